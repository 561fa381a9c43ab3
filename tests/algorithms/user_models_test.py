"""Models of users' own in whole rounds of every algorithm."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tiny_task

from tff_fssl import hparams
from tff_fssl import runtime
from tff_fssl.algorithms import fixmatch
from tff_fssl.data import clients
from tff_fssl.interface import round_hparams
from tff_fssl.models import evaluate
from tff_fssl.rounds import process as process_lib

_LAYERS = tf.keras.layers
_AT_SERVER = round_hparams.LABELS_AT_SERVER


def _every_scenario(*quick):
  """Algorithms and scenarios; slow but for some: the others have their loop."""
  return pytest.mark.parametrize(
    'name, scenario',
    [
      pytest.param(*s, marks=[] if s in quick else [pytest.mark.slow])
      for s in tiny_task.scenarios()
    ],
  )


class _Noisy(tf.keras.Model):
  """Subclassed, not built; random layers; an int64 counter; batch norm."""

  def __init__(self, rate=0.5):
    super().__init__()
    self.scale = _LAYERS.Normalization(axis=-1)  # Its counter is int64.
    self.convolution = _LAYERS.Conv2D(4, 3, use_bias=False)
    self.norm = _LAYERS.BatchNormalization()
    self.noise = _LAYERS.GaussianNoise(rate)
    self.pool = _LAYERS.GlobalAveragePooling2D()
    self.dropout = _LAYERS.Dropout(rate)
    self.logits = _LAYERS.Dense(tiny_task.NUM_CLASSES)

  def call(self, images, training=None):
    x = self.norm(self.convolution(self.scale(images)), training=training)
    x = self.noise(tf.nn.relu(x), training=training)
    return self.logits(self.dropout(self.pool(x), training=training))


def _rounds(process, cohorts, threads=1):
  """The state after cohorts of elements."""
  with tff.framework.get_context_stack().install(
    runtime.build_context(runtime.Settings(client_threads=threads))
  ):
    state = process.initialize()
    if int(state.client_work) < 1:
      state = process.next(state, []).state
    for cohort in cohorts:
      output = process.next(
        state, [tiny_task.dataset(e, process) for e in cohort]
      )
      state = output.state
  return state, output.metrics


def _cohorts(scenario):
  return [tiny_task.cohort(scenario, round_num=r) for r in (1, 2)]


def _assert_equal(first, second):
  for a, b in zip(tiny_task.flat(first), tiny_task.flat(second), strict=True):
    np.testing.assert_array_equal(a, b)


def _noisy():
  """The same, but for the subclass: some algorithms take off the classifier."""
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      _LAYERS.Normalization(axis=-1),
      _LAYERS.Conv2D(4, 3, use_bias=False),
      _LAYERS.BatchNormalization(),
      _LAYERS.ReLU(),
      _LAYERS.GaussianNoise(0.5),
      _LAYERS.GlobalAveragePooling2D(),
      _LAYERS.Dropout(0.5),
      _LAYERS.Dense(tiny_task.NUM_CLASSES),
    ]
  )


@_every_scenario(('fl2', _AT_SERVER))
def test_random_layers_repeat_whatever_the_threads(name, scenario):
  # These separate features from logits.
  functional = ('fedcon', 'protofssl', 'proxyfl')
  model = _noisy if name in functional else _Noisy
  process = tiny_task.build(name, scenario, model=model)
  cohorts = _cohorts(scenario)
  state, metrics = _rounds(process, cohorts)
  assert all(np.all(np.isfinite(w)) for w in tiny_task.flat(state))
  assert metrics['client_work']['train']['num_non_finite_clients'] == 0
  _assert_equal(state, _rounds(process, cohorts, threads=3)[0])


def test_draws_are_the_clients_own_and_the_rounds():
  """Views draw nothing here, and a batch holds all: what differs are draws."""
  process = tiny_task.build(
    'supervised',
    round_hparams.LABELS_AT_CLIENTS,
    model=_Noisy,
    plain=True,
    client_batch_size=100,
  )

  def update(seed):
    element = tiny_task.client(0, labeled=6, unlabeled=0)
    element['seed'] = np.array(seed, np.int32)
    return tiny_task.flat(_rounds(process, [[element]])[0])[0]

  np.testing.assert_array_equal(update([1, 2]), update([1, 2]))
  assert not np.allclose(update([1, 2]), update([1, 3]), atol=1e-6)
  assert not np.allclose(update([1, 2]), update([2, 2]), atol=1e-6)


@pytest.mark.slow
def test_with_dropout_fl2_with_rho_0_still_has_no_consistency():
  """W and W + eps see the same masks: at eps = 0, Q(W) is Q(W + eps)."""
  losses = [
    _rounds(
      tiny_task.build(
        'fl2',
        model=_Noisy,
        hparams=(('confidence_threshold', 0.3), ('rho', rho)),
      ),
      _cohorts(_AT_SERVER),
    )[1]['client_work']['train']['loss_consistency']
    for rho in (0.0, 0.5)
  ]
  # Other masks would make it 1e-3 and more.
  assert losses[0] < 1e-7
  assert losses[1] > 1e-5


def _regularized(strength):
  l2 = None if strength is None else tf.keras.regularizers.L2(strength)
  return tf.keras.Sequential(
    [
      tf.keras.Input(tiny_task.IMAGE_SHAPE),
      _LAYERS.Conv2D(4, 3, use_bias=False, kernel_regularizer=l2),
      _LAYERS.ReLU(),
      _LAYERS.GlobalAveragePooling2D(),
      _LAYERS.Dense(
        tiny_task.NUM_CLASSES, kernel_regularizer=l2, use_bias=False
      ),
    ]
  )


# FedMatch's clients train a peer alone.
@_every_scenario(('fedmatch', _AT_SERVER))
def test_l2_regularizers_are_weight_decay(name, scenario):
  """d/dw (a w^2) = 2 a w, at clients and server alike."""
  strength, kwargs = 0.05, {'max_gradient_norm': 0.0}
  cohorts = _cohorts(scenario)
  ours, metrics = _rounds(
    tiny_task.build(
      name,
      scenario,
      model=functools.partial(_regularized, strength),
      weight_decay=0.0,
      **kwargs,
    ),
    cohorts,
  )
  theirs, _ = _rounds(
    tiny_task.build(
      name,
      scenario,
      model=functools.partial(_regularized, None),
      weight_decay=2 * strength,
      **kwargs,
    ),
    cohorts,
  )
  # Weight decay also acts on networks of these which are not the user's.
  if name not in ('fedcon', 'proxyfl'):
    for a, b in zip(tiny_task.flat(ours), tiny_task.flat(theirs), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)
  if name != 'supervised' or scenario != _AT_SERVER:
    assert metrics['client_work']['train']['loss_regularization'] > 0
  if scenario == _AT_SERVER:
    assert metrics['finalizer']['server_loss_regularization'] > 0


def test_counters_and_moving_averages():
  process = tiny_task.build(
    'fixmatch', model=_Noisy, batch_norm_statistics='moving_average'
  )
  state, _ = _rounds(process, _cohorts(_AT_SERVER))
  before = process.initialize()
  kinds = [
    np.array_equal(a, b)
    for a, b in zip(
      before.global_model_weights.non_trainable,
      state.global_model_weights.non_trainable,
    )
  ]
  # Mean, variance and count of the normalization; then batch norm's.
  assert kinds == [True, True, True, False, False]
  # A client that fails is found in spite of a counter.
  element = tiny_task.client(0)
  assert process.find_non_finite(state, tiny_task.dataset(element), 2) is None


def test_weights_go_in_and_out_of_a_subclassed_model():
  process = tiny_task.build(
    'fixmatch', model=_Noisy, batch_norm_statistics='moving_average'
  )
  state, _ = _rounds(process, _cohorts(_AT_SERVER))
  x, y = tiny_task.examples(30, 9)
  result = evaluate.build_evaluate_fn(_Noisy, tiny_task.VIEWS, batch_size=30)(
    state.global_model_weights, x, y
  )
  model = _Noisy()
  images = tiny_task.VIEWS.plain(tf.constant(x))
  # Within the model, Keras would keep a tensor of a graph that it drops.
  model.scale.build(images.shape)
  model(images)
  process.get_model_weights(state).assign_weights_to(model)
  accuracy = np.mean(np.argmax(model(images), -1) == y)
  assert result['accuracy'] == pytest.approx(accuracy)
  put = process.set_model_weights(
    process.initialize(),
    tff.learning.models.ModelWeights(
      model.trainable_weights, model.non_trainable_weights
    ),
  )
  for a, b in zip(
    put.global_model_weights.trainable, state.global_model_weights.trainable
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'layer, words',
  [
    (lambda: _LAYERS.Dense(3, activation=tf.nn.softmax), 'must give logits'),
    (lambda: _LAYERS.Dense(1), 'one logit'),
  ],
)
def test_a_model_that_does_not_do_is_refused_with_the_process(layer, words):
  def model_fn():
    return tf.keras.Sequential([_LAYERS.Flatten(), layer()])

  with pytest.raises(hparams.UsageError, match=words):
    process_lib.build_process(
      model_fn,
      fixmatch.FixMatch(
        round=round_hparams.RoundHparams(
          scenario=round_hparams.LABELS_AT_CLIENTS
        )
      ),
      process_lib.DataSpec(
        clients.element_spec(tiny_task.IMAGE_SHAPE), tiny_task.VIEWS
      ),
      seed=0,
    )
