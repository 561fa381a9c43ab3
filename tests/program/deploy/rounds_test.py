"""Rounds of a federation: equal to those in process, whatever clients send."""

import dataclasses

import contexts
import fake_clients
import numpy as np
import pytest
import tensorflow as tf
import tiny_task

from tff_fssl.program import checkpoint
from tff_fssl.program import training_types
from tff_fssl.program.deploy import deployment
from tff_fssl.program.deploy import rounds
from tff_fssl.rounds import participation
from tff_fssl.rounds import sampling
from tff_fssl.runtime import export
from tff_fssl.runtime import values

_context = contexts.of_each_module(
  client_threads=1, simulate_secure_aggregation=True
)
_AT_CLIENTS = tiny_task.round_hparams.LABELS_AT_CLIENTS
_AT_SERVER = tiny_task.round_hparams.LABELS_AT_SERVER
_SEED, _NUM_CLIENTS, _PER_ROUND = 3, 8, 3
_REJECTED = 'client_work/train/num_rejected_clients'
_TOOK_PART = 'client_work/train/num_clients'


def _examples(scenario, client_id):
  """(labelled (x, y) or None, unlabelled x) of a client."""
  labeled = 4 if scenario == _AT_CLIENTS else 0
  element = tiny_task.client(client_id, labeled=labeled)
  pair = tuple(element['labeled'].values())
  return pair if labeled else None, element['unlabeled']['x']


class _Task:
  """A process in process, and exported."""

  def __init__(self, name, scenario, folder, **settings):
    self.process = tiny_task.build(name, scenario, **settings)
    self.initial = self.process.initialize()
    self.program = export.export(
      self.process.next,
      str(folder),
      initial=self.initial,
      simulate_secure_aggregation=True,
    )
    (folder / 'client.json').write_text(
      '{"class_names": ["a", "b", "c"], "max_examples": 99,'
      ' "labeled_also_unlabeled": false, "labels_at_server": false}'
    )
    self.clients = fake_clients.Clients(
      self.program, lambda client_id: _examples(scenario, client_id)
    )
    self.first_round = 0 if scenario == _AT_SERVER else 1
    self.rounds = rounds.Rounds(
      self.program,
      deployment.Deployment(
        values={},
        owner=checkpoint.NOBODY,
        is_private=False,
        seed=_SEED,
        num_clients=_NUM_CLIENTS,
        clients_per_round=_PER_ROUND,
        first_round=self.first_round,
        done=self.first_round - 1,
        total_rounds=2,
        rounds_per_evaluation=1,
        max_bad_rounds=3,
        keep_checkpoints=1,
        min_clients=0,
        participation=participation.ParticipationHparams(),
        splits=(),
      ),
      None,
      self.clients.send,
    )

    def load_client(_, client_id):
      labeled, unlabeled = _examples(scenario, client_id)
      return labeled, (unlabeled, None)

    self.source = sampling.build_data_source(
      self.process,
      load_client,
      seed=_SEED,
      num_clients=_NUM_CLIENTS,
      clients_per_round=_PER_ROUND,
      first_round=self.first_round,
    )

  def in_process(self, state, round_num, without=()):
    """Runs a round in process, without some of its clients."""
    ids = self.source.client_ids(_SEED, round_num)
    slots = participation.draw(
      participation.ParticipationHparams(),
      None,
      seed=_SEED,
      round_num=max(round_num, 1),
      num_clients=_NUM_CLIENTS,
      clients_per_round=_PER_ROUND,
    ).slots
    slots = {i: slots[i] for i in ids if i not in without}
    return self.process.next(state, self.source.chosen(round_num, slots))

  def leaves(self, state):
    """The bytes of a state by the program's names."""
    state_type = self.process.initialize.type_signature.result.member
    leaves = values.read_leaves(state, state_type, 'state')
    pairs = zip(self.program.parameter, leaves, strict=True)
    return {name: leaf.numpy().tobytes() for name, leaf in pairs}


def _bytes(state):
  return {name: np.asarray(value).tobytes() for name, value in state.items()}


@pytest.fixture(scope='module', name='task')
def _task(tmp_path_factory, _context):
  folder = tmp_path_factory.mktemp('task') / 'exported'
  return _Task('fixmatch', _AT_CLIENTS, folder, min_clients=2)


@pytest.fixture(scope='module', name='with_rows')
def _with_rows(tmp_path_factory, _context):
  folder = tmp_path_factory.mktemp('with_rows') / 'exported'
  return _Task('fedmatch', _AT_SERVER, folder, norm='none')


@pytest.fixture(name='phases_of_three')
def _phases_of_three(tmp_path, _context):
  return _Task('fedswitch', _AT_SERVER, tmp_path / 'exported')


@pytest.mark.parametrize(
  'made, num_phases',
  [
    ('task', 2),
    ('with_rows', 1),
    pytest.param('phases_of_three', 3, marks=pytest.mark.slow),
  ],
)
def test_rounds_have_the_bits_of_the_simulation(
  made, num_phases, request, monkeypatch
):
  task = request.getfixturevalue(made)
  monkeypatch.setattr(task.clients, 'is_reversed', True)
  task.clients.asked.clear()
  expected, state = task.initial, task.program.initial()
  for round_num in range(task.first_round, 3):
    output = task.in_process(expected, round_num)
    outcome = task.rounds.run(state, round_num)
    expected, state = output.state, outcome.state
    assert not outcome.lines
    assert _bytes(state) == task.leaves(expected)
    cohort = task.source.client_ids(_SEED, round_num)
    assert outcome.metrics[_TOOK_PART] == len(cohort)
  assert task.program.num_phases == num_phases
  assert len(task.clients.asked) == 2 * _PER_ROUND * num_phases


@pytest.fixture(name='victim')
def _victim(task):
  """The client of round 1 that misbehaves."""
  task.clients.asked.clear()
  yield task.source.client_ids(_SEED, 1)[1]
  task.clients.change = lambda ask, reply: [reply]


def _of(victim, phase, make):
  """Changes the reply of a client in a phase, or None: in all."""

  def change(ask, reply):
    if ask.client_id != victim or phase not in (None, ask.about['phase']):
      return [reply]
    return make(reply)

  return change


def _with(index, value):
  """Replaces a value of a reply, or all floats (index None)."""

  def make(reply):
    new = list(reply.values)
    places = range(len(new)) if index is None else [index]
    for place in places:
      if new[place].dtype == np.float32:
        new[place] = np.full_like(new[place], value)
    return [reply._replace(values=new)]

  return make


# (phase, what is sent, what is logged, whether it counts as rejected).
_TROUBLES = {
  'silent': (0, lambda reply: [], 'no reply in time', False),
  'failed': (
    0,
    lambda reply: [rounds.Reply(reply.client_id, {}, None, 'no\ndisk ' * 99)],
    'failed: no disk no',
    False,
  ),
  'old': (
    0,
    lambda reply: [reply._replace(about={**reply.about, 'round': 0})],
    'another message',
    False,
  ),
  'foreign app': (
    0,
    lambda reply: [reply._replace(about={**reply.about, 'program': 'x'})],
    'another version',
    False,
  ),
  'other client': (
    0,
    lambda reply: [reply._replace(about={**reply.about, 'client': 7})],
    'another message',
    False,
  ),
  'shapeless': (
    0,
    lambda reply: [reply._replace(values=None)],
    'is rejected: not values',
    True,
  ),
  'short': (
    0,
    lambda reply: [reply._replace(values=reply.values[1:])],
    'is rejected: expected',
    True,
  ),
  'wide': (
    0,
    lambda reply: [reply._replace(values=[np.zeros([9]), *reply.values[1:]])],
    'is rejected: value 0',
    True,
  ),
  'nan': (0, _with(None, np.nan), '', True),
  'huge': (0, _with(0, 1e30), '', True),
  'heavy': (0, _with(5, 2.0), '', True),
}


@pytest.mark.parametrize('trouble', _TROUBLES)
def test_a_client_in_trouble_changes_nothing(task, victim, trouble):
  phase, make, words, is_rejected = _TROUBLES[trouble]
  task.clients.change = _of(victim, phase, make)
  outcome = task.rounds.run(task.program.initial(), 1)
  metrics = outcome.metrics
  assert metrics[_REJECTED] == int(is_rejected)
  assert metrics[_TOOK_PART] == _PER_ROUND - (not is_rejected)
  assert metrics['participation/num_dropped_out'] == int(not is_rejected)
  if words:
    (line,) = outcome.lines
    assert line.startswith(f'phase 0: client {victim}: ') and words in line
    assert len(line) < 300 and '\n' not in line
    # It is not asked again.
    assert (1, victim) not in task.clients.asked
    without = task.in_process(task.initial, 1, without=[victim])
    assert _bytes(outcome.state) == task.leaves(without.state)
  else:
    assert not outcome.lines
    assert all(np.isfinite(v).all() for v in outcome.state.values())


class _Fragile:
  """A program whose operations refuse the replies of some clients.

  Attributes:
    refuses: Says of a reply's first value whether its check fails.
    breaks: Whether the server fails at the end of a round with such a reply.
  """

  def __init__(self, program, refuses, *, breaks):
    self._program, self._refuses, self._breaks = program, refuses, breaks
    self._is_spoilt = False

  def __getattr__(self, name):
    return getattr(self._program, name)

  def start(self, arguments):
    self._is_spoilt = False
    return self._program.start(arguments)

  def add(self, phase, server, totals, reply):
    if self._refuses(reply[0]):
      self._is_spoilt = self._breaks
      if not self._breaks:
        raise tf.errors.InvalidArgumentError(None, None, 'index 9\nnot in [0)')
    return self._program.add(phase, server, totals, reply)

  def stage(self, index, server):
    if self._is_spoilt and index:
      raise tf.errors.InvalidArgumentError(None, None, 'index 9\nnot in [0)')
    self._program.stage(index, server)


def _fragile(task, victim, breaks):
  """Rounds in which a client's reply makes operations fail."""
  task.clients.change = _of(victim, 0, _with(0, 7.0))
  program = _Fragile(task.program, lambda v: np.all(v == 7.0), breaks=breaks)
  return dataclasses.replace(task.rounds, program=program)


def test_a_reply_that_an_operation_refuses_is_rejected(task, victim):
  outcome = _fragile(task, victim, False).run(task.program.initial(), 1)
  assert outcome.lines == [
    f'phase 0: client {victim}: is rejected: index 9 not in [0)'
  ]
  assert outcome.metrics[_REJECTED] == 1
  without = task.in_process(task.initial, 1, without=[victim])
  assert _bytes(outcome.state) == task.leaves(without.state)


def test_a_round_whose_replies_fail_together_is_discarded(task, victim):
  state = task.program.initial()
  outcome = _fragile(task, victim, True).run(state, 1)
  ids = sorted(task.source.client_ids(_SEED, 1))
  assert outcome.lines == [
    'is discarded: the replies cannot be combined, of clients'
    f' {", ".join(map(str, ids))}: index 9 not in [0)'
  ]
  assert outcome.metrics[_REJECTED] == _PER_ROUND
  assert training_types.is_bad_round(outcome.metrics)
  weights = [n for n in state if 'global_model_weights' in n]
  assert all(np.array_equal(state[n], outcome.state[n]) for n in weights)
  # The next round has other replies.
  task.clients.change = lambda ask, reply: [reply]
  assert not task.rounds.run(outcome.state, 2).lines


def test_errors_that_no_client_caused_end_the_server(task, monkeypatch):
  def fail(index, server):
    raise tf.errors.InternalError(None, None, 'no disk')

  monkeypatch.setattr(task.program, 'stage', fail)
  with pytest.raises(tf.errors.InternalError):
    task.rounds.run(task.program.initial(), 1)


@pytest.mark.usefixtures('victim')
def test_under_dp_neither_counts_nor_seeds_tell_of_clients(task):
  values = {**task.rounds.deployment.values, 'aggregator': 'dp'}
  noised = dataclasses.replace(
    task.rounds,
    deployment=dataclasses.replace(task.rounds.deployment, values=values),
  )
  seeds_sent, asked, make = [], [], _TROUBLES['failed'][1]

  def change(ask, reply):
    seeds_sent.append(tuple(ask.about['seed']))
    asked.append(ask.client_id)
    return make(reply) if ask.client_id == asked[0] else [reply]

  task.clients.change = change
  outcome = noised.run(task.program.initial(), 1)
  # A client that cannot read its data is none that is missing.
  assert outcome.metrics[_TOOK_PART] == _PER_ROUND
  assert outcome.metrics['participation/num_dropped_out'] == 0
  assert not outcome.lines
  cohorts = [tuple(sorted(noised._draw(1).slots)) for _ in range(9)]
  assert len(set(cohorts)) > 1
  first = set(seeds_sent)
  noised.run(task.program.initial(), 1)
  assert len(set(seeds_sent)) == len(seeds_sent) > len(first)


def test_a_node_that_dies_between_two_phases(task, victim):
  task.clients.change = _of(victim, 1, lambda reply: [])
  outcome = task.rounds.run(task.program.initial(), 1)
  assert outcome.lines == [f'phase 1: client {victim}: no reply in time']
  # Its update counts, its moments do not.
  assert outcome.metrics[_TOOK_PART] == _PER_ROUND
  whole = _bytes(task.rounds.run(task.program.initial(), 1).state)
  task.clients.change = lambda ask, reply: [reply]
  honest = _bytes(task.rounds.run(task.program.initial(), 1).state)
  differs = {name for name in honest if honest[name] != whole[name]}
  assert differs and all('non_trainable' in n or 'count' in n for n in differs)


def test_replies_that_nobody_asked_for(task, victim):
  honest = task.rounds.run(task.program.initial(), 1)
  other = ({*range(_NUM_CLIENTS)} - {*task.source.client_ids(_SEED, 1)}).pop()

  def change(ask, reply):
    lie = _with(None, 9.0)(reply)[0]
    # A second reply, and one in the name of a client that was not drawn.
    return [reply, lie, lie._replace(client_id=other)]

  task.clients.change = change
  outcome = task.rounds.run(task.program.initial(), 1)
  assert _bytes(outcome.state) == _bytes(honest.state)
  assert sum('replied before' in line for line in outcome.lines) == 6
  assert sum('was not asked' in line for line in outcome.lines) == 6


def test_too_few_clients_change_nothing(task, victim):
  task.clients.change = lambda ask, reply: (
    [reply] if ask.client_id == victim else []
  )
  state = task.program.initial()
  outcome = task.rounds.run(state, 1)
  assert outcome.metrics['participation/too_few_clients'] == 1
  kept = [name for name in state if 'global_model_weights' in name]
  assert all(np.array_equal(state[n], outcome.state[n]) for n in kept)


@pytest.mark.usefixtures('victim')
@pytest.mark.parametrize('trouble', ['silent', 'failed'])
def test_a_round_without_anybody_is_none(task, trouble):
  make = _TROUBLES[trouble][1]
  task.clients.change = lambda ask, reply: make(reply)
  state = task.program.initial()
  cohorts = []
  for attempt in range(4):
    task.clients.asked.clear()
    with pytest.raises(rounds.NobodyError) as error:
      task.rounds.run(state, 1, attempt)
    cohorts.append(frozenset(i for _, i in task.clients.asked))
    assert len(error.value.lines) == _PER_ROUND
  # Others may be there.
  assert cohorts[0] == set(task.source.client_ids(_SEED, 1))
  assert len(set(cohorts)) > 1


def test_a_row_of_another_client_is_rejected(with_rows):
  task = with_rows
  names = [spec['name'] for spec in task.program.specs(0)]
  place = next(i for i, n in enumerate(names) if n.endswith('row/client_id'))
  first, second, _ = task.source.client_ids(_SEED, 1)
  task.clients.change = _of(
    second,
    0,
    lambda reply: [
      reply._replace(
        values=[
          np.int32(first) if i == place else value
          for i, value in enumerate(reply.values)
        ]
      )
    ],
  )
  outcome = task.rounds.run(task.program.initial(), 1)
  assert outcome.metrics[_REJECTED] == 1
  assert outcome.lines == [
    f'phase 0: client {second}: is rejected: it sends a row of client {first}'
  ]
