"""Messages of anybody are read as the expected values, or not at all."""

import fake_flwr
import numpy as np
import pytest

_SPECS = [
  {'dtype': 'float32', 'shape': [2, 3]},
  {'dtype': 'bool', 'shape': []},
  {'dtype': 'int32', 'shape': [None]},
  {'dtype': 'string', 'shape': []},
]
_VALUES = [
  np.arange(6, dtype=np.float32).reshape(2, 3),
  np.bool_(True),
  np.array([4, 5], np.int32),
  b'a\0',
]


def test_values_arrive_as_they_were(app):
  content = app.wire.encode({'round': 3, 'seed': [1, -2]}, _VALUES)
  assert app.wire.about_of(content) == {'round': 3, 'seed': [1, -2]}
  found = app.wire.decode(content, _SPECS)
  for value, expected in zip(found, _VALUES, strict=True):
    assert np.asarray(value).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(value, expected)


def _changed(app, position, **fields):
  content = app.wire.encode({}, _VALUES)
  array = content['values'][str(position)]
  for name, value in fields.items():
    setattr(array, name, value)
  return content


@pytest.mark.parametrize(
  'position, fields',
  [
    (0, {'data': b''}),
    (0, {'data': bytes(25)}),
    (0, {'data': 'text'}),
    (0, {'shape': (3, 2)}),
    (0, {'shape': (6,)}),
    (0, {'shape': ()}),
    (2, {'shape': (-1,)}),
    (2, {'shape': (2**62,)}),
    (2, {'shape': (3,)}),
    (1, {'data': bytes(2)}),
    (1, {'data': b'\2'}),
    (1, {'data': b'\xff'}),
  ],
)
def test_other_forms_are_no_values(app, position, fields):
  assert app.wire.decode(_changed(app, position, **fields), _SPECS) is None


def test_nothing_of_an_impossible_size_is_no_value(app):
  array = fake_flwr.Array('float32', (2**62, 0), 'raw', b'')
  content = fake_flwr.RecordDict(
    {'values': fake_flwr.ArrayRecord({'0': array})}
  )
  spec = {'dtype': 'float32', 'shape': [None, 0]}
  assert app.wire.decode(content, [spec]) is None


def test_what_a_message_claims_does_not_count(app):
  content = _changed(app, 0, dtype='object', stype='pickle')
  assert app.wire.decode(content, _SPECS)[0].dtype == np.float32


def test_messages_without_values(app):
  content = app.wire.encode({}, _VALUES)
  assert app.wire.decode(content, _SPECS[1:]) is None
  del content['values']['3']
  content['values']['x'] = fake_flwr.Array('string', (), 'raw', b'')
  assert app.wire.decode(content, _SPECS) is None
  for other in ({}, {'values': {}}, {'values': fake_flwr.ConfigRecord()}):
    assert app.wire.decode(fake_flwr.RecordDict(other), _SPECS) is None
    assert app.wire.about_of(fake_flwr.RecordDict(other)) == {}
