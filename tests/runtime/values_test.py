"""What is taken as an argument, beside TFF's own context."""

import collections
import math

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_fssl import runtime

_DTYPES = (
  np.bool_,
  np.int8,
  np.uint8,
  np.int16,
  np.int32,
  np.uint32,
  np.int64,
  np.uint64,
  np.float16,
  np.float32,
  np.float64,
  np.complex64,
  np.str_,
)
_EDGES = tuple(
  sign * 2**bits + more
  for bits in (7, 8, 15, 16, 31, 32, 63, 64)
  for sign in (1, -1)
  for more in (-1, 0, 1)
)
_PYTHON = (
  st.sampled_from(_EDGES)
  | st.integers(-300, 300)
  | st.floats()
  | st.sampled_from([1e300, -1e300, 65504.0, 65520.0, 3.4e38, 3.5e38])
  | st.booleans()
  | st.text('ab', max_size=3)
  | st.sampled_from([b'\xff\x00', b'', None, 1j, 1e300j])
)
_NUMPY = st.builds(
  lambda dtype, value, shape: np.full(shape, value).astype(dtype),
  st.sampled_from([d for d in _DTYPES if d is not np.str_]),
  st.integers(0, 1),
  st.sampled_from([(), (1,), (2, 1)]),
)
_VALUES = (
  _PYTHON
  | _NUMPY
  | _NUMPY.map(lambda a: a[()])
  | _NUMPY.map(tf.constant)
  | st.lists(_PYTHON, max_size=2)
  | st.lists(st.integers(-2, 300), min_size=2, max_size=2)
)


def _identity(type_spec):
  return tff.tensorflow.computation(lambda x: x, type_spec)


_TENSORS = {
  (dtype, shape): _identity(tff.TensorType(dtype, shape))
  for dtype in _DTYPES
  for shape in ((), (None,), (2,))
}


def _outcome(call, context, comp, *args):
  """('taken', result) or ('refused', error)."""
  try:
    return 'taken', call(context, comp, *args)
  except Exception as error:  # pylint: disable=broad-except
    return 'refused', error


def _same(a, b):
  a, b = np.asarray(a), np.asarray(b)
  if a.dtype == object or b.dtype == object:
    return a.tolist() == b.tolist()
  return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.sampled_from(list(_TENSORS)), _VALUES)
def test_numbers_as_tff_takes_them(call, in_process, worker, key, value):
  comp = _TENSORS[key]
  expected, theirs = _outcome(call, worker, comp, value)
  outcome, ours = _outcome(call, in_process, comp, value)
  assert outcome == expected, (key, value, theirs, ours)
  if outcome == 'taken':
    assert _same(ours, theirs)
  else:
    assert isinstance(ours, TypeError) and '\n' not in str(ours)


@pytest.mark.parametrize(
  'dtype, value',
  [
    (np.int32, 2**31),
    (np.int32, -(2**31) - 1),
    (np.int32, 1.0),
    (np.int32, True),
    (np.int32, np.array(1)),
    (np.int32, np.array([2**40])[0]),
    (np.uint8, 256),
    (np.uint8, -1),
    (np.uint8, np.int32(1)),
    (np.float32, 1e300),
    (np.float32, np.float64(1)),
    (np.float32, 1),
    (np.float32, '1'),
    (np.str_, 1),
    (np.bool_, 1),
    (np.int32, None),
    (np.float32, None),
  ],
)
def test_what_does_not_fit_is_refused_everywhere(
  call, in_process, dtype, value
):
  with pytest.raises(TypeError, match='^argument: expected'):
    call(in_process, _TENSORS[dtype, ()], value)
  clients = tff.federated_computation(
    lambda x: tff.federated_map(_TENSORS[dtype, ()], x),
    tff.FederatedType(dtype, tff.CLIENTS),
  )
  with pytest.raises(TypeError, match='^argument, client 0: expected'):
    call(in_process, clients, [value])
  struct = _identity(tff.StructType([('a', dtype)]))
  with pytest.raises(TypeError, match=r'^argument\.a: expected'):
    call(in_process, struct, {'a': value})


def test_strings_keep_their_zero_bytes(call, in_process):
  assert call(in_process, _TENSORS[np.str_, ()], b'a\x00') == b'a\x00'
  assert call(in_process, _TENSORS[np.str_, ()], 'é') == 'é'.encode()


_Pair = collections.namedtuple('_Pair', 'a b')


# TFF has it; nothing else here does.
_Attrs = pytest.importorskip('attrs').make_class('_Attrs', ['a', 'b'])
_STRUCTS = {
  'unnamed': tff.StructType([np.int32, np.float32]),
  'named': tff.StructType([('a', np.int32), ('b', np.float32)]),
  'dict': tff.to_type(collections.OrderedDict(a=np.int32, b=np.float32)),
  'tuple': tff.to_type(_Pair(np.int32, np.float32)),
}
_STRUCT_VALUES = [
  (1, 0.5),
  [1, 0.5],
  {'a': 1, 'b': 0.5},
  collections.OrderedDict(a=1, b=0.5),
  _Pair(1, 0.5),
  _Attrs(1, 0.5),
  tff.structure.Struct([(None, 1), (None, 0.5)]),
  (1,),
  (0.5, 1),
  {'a': 1},
  (1, 0.5, 2),
  3,
  None,
]


@pytest.mark.parametrize('name', list(_STRUCTS))
def test_structures_as_tff_takes_them(call, in_process, worker, name):
  type_spec = _STRUCTS[name]
  comps = (
    (_identity(type_spec), lambda v: (v,)),
    (_identity((np.int32, type_spec)), lambda v: ((3, v),)),
    (
      tff.federated_computation(
        lambda x: x, tff.FederatedType(type_spec, tff.CLIENTS)
      ),
      lambda v: ([v, v],),
    ),
  )
  for comp, wrap in comps:
    for value in _STRUCT_VALUES:
      args = wrap(value)
      expected, theirs = _outcome(call, worker, comp, *args)
      outcome, ours = _outcome(call, in_process, comp, *args)
      assert outcome == expected, (value, theirs, ours)
      if outcome == 'taken':
        assert ours == theirs and type(ours) is type(theirs)
      else:
        assert isinstance(ours, TypeError)


def test_dicts_are_read_by_name_where_there_are_names(call, in_process):
  comp = _identity(_STRUCTS['named'])
  result = call(in_process, comp, {'b': 0.5, 'a': 1})
  assert dict(result) == {'a': 1, 'b': 0.5}
  for value in ({'x': 1, 'y': 0.5}, collections.namedtuple('Q', 'b a')(1, 0.5)):
    with pytest.raises(TypeError, match='^argument: expected'):
      call(in_process, comp, value)


@pytest.mark.parametrize('name', ['in_process', 'tff_worker'])
def test_default_number_of_clients(call, name):
  tens = tff.tensorflow.computation(lambda: tf.constant(10))
  ints = tff.FederatedType(np.int32, tff.CLIENTS)

  @tff.federated_computation
  def without():
    return tff.federated_sum(tff.federated_eval(tens, tff.CLIENTS))

  @tff.federated_computation(ints)
  def given(x):
    return tff.federated_sum(x), without()

  context = runtime.build_context(runtime.Settings(name, default_num_clients=3))
  assert call(context, without) == 30
  assert call(context, given, [1, 2]) == (3, 20)
  assert call(context, given, []) == (0, 0)
  getattr(context, 'close', lambda: None)()
  asynchronous = runtime.build_async_context(
    runtime.Settings(name, default_num_clients=3)
  )
  getattr(asynchronous, 'close', lambda: None)()
  with pytest.raises(ValueError, match='default_num_clients=-1'):
    runtime.build_context(runtime.Settings(name, default_num_clients=-1))


def test_not_a_number_is_a_number(call, in_process):
  assert math.isnan(call(in_process, _TENSORS[np.float32, ()], math.nan))
