"""FedMatch's rounds, server and flags: what its specification says of them."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
import tiny_rounds
import tiny_task

from tff_fssl.algorithms import fedmatch
from tff_fssl.hparams import UsageError
from tff_fssl.models import server_model
from tff_fssl.program import checkpoint
from tff_fssl.program import config
from tff_fssl.rounds import process as process_lib

_SERVER, _CLIENTS = tiny_rounds.SERVER, tiny_rounds.CLIENTS
_DELTA, _ZERO = np.float32(2e-3), np.float32(1e-2)
# Thresholds that some changes reach.
_OWN = {'delta_threshold': float(_DELTA), 'psi_threshold': float(_ZERO)}
_PLAIN_SGD = {
  'client_learning_rate': 0.01,
  'max_gradient_norm': 0.0,
  'momentum': 0.0,
  'proximal_strength': 0.0,
  'server_optimizer_momentum': 0.0,
  'weight_decay': 0.0,
}


def _next(process, state, elements):
  return process.next(state, [tiny_task.dataset(e, process) for e in elements])


def _run(process, scenario, num_rounds=3):
  """(state before, output) of rounds with clients."""
  state, outputs = process.initialize(), []
  if int(state.client_work) < 1:
    state = process.next(state, []).state
  for round_num in range(1, num_rounds + 1):
    # Client 3 comes later.
    size = 3 if round_num == 1 else 4
    cohort = tiny_task.cohort(scenario, size, round_num)
    output = _next(process, state, cohort)
    outputs.append((state, output))
    state = output.state
  return outputs


@pytest.fixture(scope='module', name='at_clients')
def _at_clients():
  process = tiny_task.build(
    'fedmatch', _CLIENTS, norm='none', hparams=tuple(_OWN.items()), **_PLAIN_SGD
  )
  return process, _run(process, _CLIENTS)


@pytest.fixture(scope='module', name='at_server')
def _at_server():
  process = tiny_task.build(
    'fedmatch',
    _SERVER,
    norm='none',
    hparams=tuple(_OWN.items()),
    average_decay=0.5,
    server_epochs=3,
    **_PLAIN_SGD,
  )
  return process, _run(process, _SERVER)


def _flat(tensors):
  return np.concatenate([np.ravel(t) for t in tensors])


def _sp(psi):
  return np.where(np.abs(psi) > _ZERO, psi, np.float32(0))


def _sets(state):
  model = state.global_model_weights
  return {
    'sigma': _flat(model.trainable),
    'psi': _flat(model.sets['psi'].trainable),
  }


def _uploads(state):
  """Client id -> what the server keeps of it."""
  table = state.distributor['table']['uploads']
  return {
    int(owner): {n: v[slot] for n, v in table['values'].items()}
    for slot, owner in enumerate(table['owner'])
    if owner >= 0
  }


def _expected(before, after, helper_ids):
  """(changes of the sets, % down, % up) of a client, by A3 in NumPy."""
  changes, down, up = {}, 0, 0
  for name, has in before['server'].items():
    sp = _sp if name == 'psi' else lambda w: w
    new, received = sp(has), sp(has)
    if before['own'] is None:
      down += has.size
    else:
      old = before['own'][name]
      is_sent = np.abs(new - old) > _DELTA
      down += is_sent.sum()
      received = np.where(is_sent, new, old)
      if name == 'psi':
        for helper in helper_ids:
          theirs = _sp(before['uploads'][helper]['psi'])
          masked = np.where(theirs != 0, _sp(old), np.float32(0))
          down += np.count_nonzero(np.abs(theirs - masked) > _DELTA)
    changes[name] = received - after[name]
    # What was sent is what differs; the rest is what was received.
    up += np.count_nonzero(np.abs(changes[name]) > _DELTA)
    small = np.abs(changes[name]) <= _DELTA
    np.testing.assert_array_equal(after[name][small], received[small])
  size = before['server']['sigma'].size
  return changes, 100 * down / size, 100 * up / size


def _helper_ids(uploads, client_id):
  """The two others with the closest embeddings."""
  if client_id not in uploads:
    return []
  own = uploads[client_id]['embedding']
  distances = {
    i: np.sum((row['embedding'] - own) ** 2)
    for i, row in uploads.items()
    if i != client_id
  }
  return sorted(distances, key=distances.get)[:2]


@pytest.mark.parametrize('scenario', [_CLIENTS, _SERVER])
def test_a_round_from_the_uploads(at_clients, at_server, scenario):
  """Sigma and psi change by the mean change of clients (I14), and what travels
  is counted (A3), to the element."""
  _, outputs = at_clients if scenario == _CLIENTS else at_server
  shares = []
  for state, output in outputs:
    uploads, after = _uploads(state), _uploads(output.state)
    server, new = _sets(state), _sets(output.state)
    all_changes, downs, ups = [], [], []
    cohort = range(3 if not uploads else 4)
    for client_id in cohort:
      before = {
        'server': server,
        'own': uploads.get(client_id),
        'uploads': uploads,
      }
      changes, down, up = _expected(
        before, after[client_id], _helper_ids(uploads, client_id)
      )
      all_changes.append(changes)
      downs.append(down)
      ups.append(up)
    train = output.metrics['client_work']['train']
    np.testing.assert_allclose(train['percent_down'], np.mean(downs), rtol=1e-5)
    np.testing.assert_allclose(train['percent_up'], np.mean(ups), rtol=1e-5)
    helped = np.mean([i in uploads for i in cohort])
    np.testing.assert_allclose(train['helped_clients'], helped, rtol=1e-6)
    shares.append((np.mean(downs), np.mean(ups)))
    psi = np.mean([c['psi'] for c in all_changes], 0)
    np.testing.assert_allclose(new['psi'], server['psi'] - psi, atol=1e-6)
    sigma = np.mean([c['sigma'] for c in all_changes], 0)
    if scenario == _CLIENTS:
      np.testing.assert_allclose(
        new['sigma'], server['sigma'] - sigma, atol=1e-6
      )
    else:  # Clients do not move it, the server does.
      assert not np.any(sigma)
      assert np.any(new['sigma'] != server['sigma'])
  assert shares[0][0] == 200.0
  # Some elements travel, others do not.
  whole = 100.0 if scenario == _SERVER else 200.0
  assert any(0 < up < whole for _, up in shares)
  assert any(0 < down % 100 for down, _ in shares[1:])


def test_bytes_of_dense_sets(at_clients, at_server):
  """Both sets travel in a simulation; a row costs its id and its mark."""
  for process, outputs in (at_clients, at_server):
    sets = _sets(outputs[0][0])
    size = 4 * sets['sigma'].size
    figures = outputs[-1][1].metrics['communication']
    assert figures['bytes_down_model'] == figures['bytes_down_psi'] == size + 4
    assert figures['bytes_down_exchange'] == 0
    assert figures['bytes_down_per_client'] == 2 * (size + 4) + 4
    assert figures['bytes_up_psi'] == size
    assert figures['bytes_up_model'] == size + 4  # And a weight.
    assert figures['bytes_up_exchange'] == 4 + 1
    assert process.num_clients == tiny_task.NUM_CLIENTS


class TestPrediction:
  """Sigma and psi predict, and psi only where it is large: A2."""

  def test_weights(self, at_server):
    process, outputs = at_server
    initial = process.initialize()
    for state in (initial, outputs[-1][1].state):
      sets = _sets(state)
      expected = sets['sigma'] + _sp(sets['psi'])
      weights = process.get_model_weights(state)
      np.testing.assert_allclose(_flat(weights.trainable), expected, atol=1e-7)
    # Some are small. Whether training leaves small ones depends on rounding.
    psi = _sets(initial)['psi']
    assert np.any(_sp(psi) != psi)

  def test_the_average_is_of_what_predicts(self, at_server):
    process, outputs = at_server
    average = None
    for state, output in outputs:
      if average is None:
        average = _flat(process.get_model_weights(state).trainable)
      now = _flat(process.get_model_weights(output.state).trainable)
      average = 0.5 * average + 0.5 * now
      actual = output.state.global_model_weights.sets['average']
      np.testing.assert_allclose(_flat(actual.trainable), average, atol=1e-6)

  def test_a_warm_start_predicts_as_before(self, at_server):
    process, outputs = at_server
    weights = process.get_model_weights(outputs[-1][1].state)
    state = process.set_model_weights(process.initialize(), weights)
    sets = _sets(state)
    np.testing.assert_array_equal(
      sets['sigma'] + sets['psi'], _flat(weights.trainable)
    )
    np.testing.assert_allclose(sets['psi'], 0.2 * sets['sigma'], atol=1e-6)

  def test_static_batch_norm_is_of_what_predicts(self):
    process = tiny_task.build('fedmatch', _SERVER)
    state = process.next(process.initialize(), []).state
    cohort = tiny_task.cohort(_SERVER)
    state = _next(process, state, cohort).state
    x = np.concatenate(
      [tiny_task.examples(9, 7)[0], *(e['unlabeled']['x'] for e in cohort)]
    )
    kernel = process.get_model_weights(state).trainable[0]
    outputs = tf.nn.conv2d(tiny_task.VIEWS.plain(x), kernel, 1, 'VALID')
    mean, variance = tf.nn.moments(outputs, [0, 1, 2])
    model = state.global_model_weights
    np.testing.assert_allclose(model.non_trainable[0], mean, atol=1e-5)
    np.testing.assert_allclose(model.non_trainable[1], variance, rtol=1e-4)


def test_one_set_without_helpers_is_fixmatch():
  """Table 5's "without decomposition", with FixMatch's weights and views."""
  settings = {'norm': 'none', 'plain': True, 'client_labeled_batch_size': 4}
  own = (
    ('confidence_threshold', 0.0),
    ('decomposition', False),
    ('labeled_loss_weight', 1.0),
    ('pseudo_label_weight', 1.0),
    ('remembered_clients', 0),
  )
  ours = tiny_task.build('fedmatch', _SERVER, hparams=own, **settings)
  theirs = tiny_task.build(
    'fixmatch',
    _SERVER,
    hparams=(('confidence_threshold', 0.0),),
    **settings,
  )
  for (_, a), (_, b) in zip(_run(ours, _SERVER, 2), _run(theirs, _SERVER, 2)):
    tiny_rounds.assert_same(
      tiny_rounds.model(a).trainable, tiny_rounds.model(b).trainable, atol=1e-6
    )


def test_sigma_frozen_and_no_state_of_clients():
  """A server of rate 0: only psi learns. Nobody is remembered."""
  process = tiny_task.build(
    'fedmatch',
    _SERVER,
    norm='none',
    hparams=(('remembered_clients', 0),),
    server_learning_rate=0.0,
  )
  assert not process.num_clients
  start = _sets(process.initialize())
  (_, output) = _run(process, _SERVER, 1)[0]
  after = _sets(output.state)
  np.testing.assert_array_equal(after['sigma'], start['sigma'])
  assert np.any(after['psi'] != start['psi'])
  train = output.metrics['client_work']['train']
  assert (train['percent_down'], train['percent_up']) == (200.0, 100.0)
  assert train['helped_clients'] == 0.0
  assert process_lib.get_map_reduce_form(process) is not None


def test_sigma_and_psi_are_evaluated_alone(at_clients):
  """Figure 6 (b)."""
  hparams = (('evaluate_sets', True), ('psi_threshold', 0.01))
  process = tiny_task.build('fedmatch', _SERVER, norm='none', hparams=hparams)
  model = process.initialize().global_model_weights
  weights = {
    name: way.weights(server_model.ServerModel(*model)).trainable
    for name, way in process.prediction.also.items()
  }
  assert list(weights) == ['sigma', 'psi']
  whole = process.prediction.weights(server_model.ServerModel(*model)).trainable
  psi = model.sets['psi'].trainable
  for sigma, small, s, p, both in zip(
    model.trainable, psi, weights['sigma'], weights['psi'], whole, strict=True
  ):
    np.testing.assert_array_equal(s, sigma)
    np.testing.assert_array_equal(p, np.where(np.abs(small) > 0.01, small, 0))
    np.testing.assert_array_equal(both, s + p)
  assert not at_clients[0].prediction.also


def test_past_models_help_and_nobody_is_remembered():
  own = (
    ('helpers', 'past'),
    ('num_helpers', 2),
    ('remembered_clients', 0),
  )
  process = tiny_task.build('fedmatch', _CLIENTS, norm='none', hparams=own)
  alone = tiny_task.build(
    'fedmatch',
    _CLIENTS,
    norm='none',
    hparams=(('remembered_clients', 0),),
  )
  assert not process.num_clients
  assert process_lib.get_map_reduce_form(process) is not None
  outputs, others = (_run(p, _CLIENTS) for p in (process, alone))
  weights = [
    _flat(process.get_model_weights(before).trainable) for before, _ in outputs
  ]
  size = weights[0].size * 4
  for i, ((before, output), (_, other)) in enumerate(zip(outputs, others)):
    helped = min(i, 2)
    past = before.global_model_weights.sets['past_models']
    expected = [*weights[:i][::-1], *np.zeros([2, weights[0].size])][:2]
    np.testing.assert_array_equal(past, np.stack(expected))
    train = output.metrics['client_work']['train']
    assert train['helped_clients'] == float(helped > 0)
    assert np.isfinite(train['loss_helpers']) == (helped > 0)
    assert train['percent_down'] == 100.0 * (2 + helped)
    down = output.metrics['communication']['bytes_down_past_models']
    assert down == 2 * size * (helped > 0)
    same = not tiny_rounds.differ(
      tiny_rounds.model(output).trainable, tiny_rounds.model(other).trainable
    )
    assert same == (helped == 0)


def test_past_models_are_whole_networks():
  """The model that a client starts from agrees with it in the first batch."""
  own = {'helpers': 'past', 'num_helpers': 1, 'remembered_clients': 0}
  process = tiny_task.build(
    'fedmatch',
    _SERVER,
    norm='none',
    hparams=tuple({**own, 'helper_interval': 2}.items()),
    client_batch_size=12,
    plain=True,
  )
  state = process.next(process.initialize(), []).state
  model = state.global_model_weights
  now = _flat(process.get_model_weights(state).trainable)
  sets = type(model.sets)(model.sets, past_models=now[None])
  control = type(model.control)(num_past_models=np.float32(1))
  state = state._replace(
    global_model_weights=model._replace(sets=sets, control=control),
    client_work=np.int32(2),
  )
  output = _next(process, state, tiny_task.cohort(_SERVER))
  train = output.metrics['client_work']['train']
  assert train['helped_clients'] == 1.0
  assert abs(train['loss_helpers']) < 1e-6
  assert np.any(now)
  # After a discarded round, the state says the same; none are due in round 3.
  later = state._replace(client_work=np.int32(3))
  output = _next(process, later, tiny_task.cohort(_SERVER))
  assert output.metrics['client_work']['train']['helped_clients'] == 0.0


_DEPLOYED = (
  '--algorithm=fedmatch',
  '--norm=gn',
  '--num_labels=10',
  '--max_client_examples=60000',
)


def test_uploads_in_files_change_nothing(at_server, tmp_path):
  _, expected = at_server
  process = tiny_task.build(
    'fedmatch',
    _SERVER,
    norm='none',
    hparams=(*_OWN.items(), ('uploads_in', 'files')),
    average_decay=0.5,
    server_epochs=3,
    **_PLAIN_SGD,
  )
  files = checkpoint.RowFiles(str(tmp_path))
  rows = checkpoint.OutsideRows(process.outside, files)
  state = process.next(process.initialize(), []).state
  for round_num, (_, output) in enumerate(expected, 1):
    cohort = tiny_task.cohort(_SERVER, 3 if round_num == 1 else 4, round_num)
    ids = range(len(cohort))
    if round_num > 1:
      with pytest.raises(Exception, match='have not been brought'):
        _next(process, state, cohort)
    result = _next(process, rows.load(state, ids), cohort)
    state = rows.store(result.state)
    tiny_rounds.assert_same(
      (result.metrics, *state[::4]),
      (output.metrics, *output.state[::4]),
    )
    for client_id, upload in _uploads(output.state).items():
      row = files.read(client_id, round_num)
      assert sorted(row) == ['psi', 'sigma']
      for name, value in row.items():
        np.testing.assert_array_equal(value, upload[name])
    held = state.distributor['table']['uploads']['window']
    assert all(not len(a) for a in tf.nest.flatten(held))


def test_large_uploads_are_in_files_unless_they_shall_not_be():
  def build(population, *flags):
    found = config.parse_config([*_DEPLOYED, *flags])
    algorithm = dataclasses.replace(found.algorithm, round=found.round)
    return algorithm.exchange()(population)

  large = _population(6_568_640, 100)
  assert build(large).outside is not None
  assert build(_population(1000, 100)).outside is None
  with pytest.raises(UsageError, match='give --fedmatch.uploads_in=files, or'):
    build(large, '--fedmatch.uploads_in=state')


def _population(size, num_clients):
  from tff_fssl.interface import base
  from tff_fssl.models.weights import Weights

  weights = Weights((tf.TensorSpec([size]),), (), tf.TensorSpec([]))
  return base.Setup(num_clients, weights, num_classes=10)


@pytest.mark.parametrize(
  'given',
  [
    ('num_helpers=0', 'helper_interval=5'),
    ('num_helpers=0', 'agreement=false'),
    ('num_helpers=0', 'consistency_weight=0.5'),
    ('agreement=false', 'consistency_weight=0', 'num_helpers=3'),
    ('decomposition=false', 'l1_weight=0.1'),
    ('remembered_clients=0', 'delta_threshold=0.001'),
    ('remembered_clients=0', 'uploads_in=files'),
    ('delta_threshold=-1', 'num_helpers=0', 'uploads_in=files'),
    ('remembered_clients=0', 'patience=3'),
    ('remembered_clients=0', 'variant=paper'),
    ('num_helpers=0', 'helpers=past'),
    ('helpers=past', 'delta_threshold=-1', 'uploads_in=files'),
  ],
)
def test_flags_without_effect_are_refused(given):
  flags = [f'--fedmatch.{flag}' for flag in given]
  with pytest.raises(UsageError, match='has no effect'):
    config.parse_config([*_DEPLOYED, *flags])


@pytest.mark.parametrize(
  'flag, message',
  [
    ('variant=both', 'allowed are ours, paper, code'),
    ('delta_threshold=-2.0', 'at least -1'),
  ],
)
def test_values_out_of_range_are_refused(flag, message):
  name, value = flag.split('=')
  kind = type(getattr(fedmatch.FedMatch(), name))
  with pytest.raises(UsageError, match=message) as refused:
    fedmatch.FedMatch(**{name: kind(value)})
  assert str(refused.value).startswith('--fedmatch.')
