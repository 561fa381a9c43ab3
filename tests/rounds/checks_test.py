"""Names that an algorithm gives and refers to."""

import dataclasses
from typing import NamedTuple

import pytest
import tensorflow as tf
import two_sets

from tff_fssl import hparams as hparams_lib
from tff_fssl.interface import base
from tff_fssl.models.weights import Weights


class TestNames:
  """A name that nothing has is an error when the process is built."""

  @staticmethod
  def _changed(base_class=two_sets.Switching, **methods):
    return dataclasses.dataclass(frozen=True)(
      type('Changed', (base_class,), methods)
    )()

  def _check(self, algorithm, *words):
    with pytest.raises(Exception) as error:
      two_sets.build(algorithm)
    for word in words:
      assert word in str(error.value)
    return error.value

  def test_of_a_network(self):
    networks = {'techer': base.AuxiliaryNetwork()}
    error = self._check(
      self._changed(networks=lambda self: networks),
      "networks='techer'",
      'weights that the server sends: teacher',
      "did you mean 'teacher'",
    )
    assert isinstance(error, hparams_lib.UsageError)

  def test_of_a_network_in_the_servers_training(self):
    @dataclasses.dataclass(frozen=True)
    class Trainer(base.Algorithm):
      def networks(self):
        return {'techer': base.AuxiliaryNetwork()}

    self._check(
      self._changed(server_trainer=lambda self: Trainer()),
      "server_trainer: networks='techer'",
      'weights that the server keeps: teacher',
    )

  def test_of_streams_and_views(self):
    stream = base.Stream({'weak': 'weak', 'strong': 'storng'})
    self._check(
      self._changed(streams=lambda self: {'unlabeled': stream}),
      "view 'strong'='storng'",
      'plain, weak, strong',
    )
    streams = two_sets.Switching().streams()
    streams['more'] = base.Stream({}, partner_of='unlabelled')
    self._check(
      self._changed(streams=lambda self: streams),
      "partner_of='unlabelled'",
      'streams: unlabeled',
    )

  def test_of_a_broadcast(self):
    def broadcasts(self, state):
      sent = two_sets.Switching.broadcasts(self, state)
      return {**sent, 'techer': base.Broadcast()}

    self._check(
      self._changed(broadcasts=broadcasts), "broadcasts='techer'", 'teacher'
    )

  def test_of_uploads(self):
    declared = dict.fromkeys(('teacher', 'stud'), base.Upload(0.0, 1.0))
    self._check(
      self._changed(uploads=lambda self, setup: declared),
      'uploads has student, teacher;',
      'declares stud, teacher',
    )

  def test_of_rows(self):
    def build(self, population):
      exchange = two_sets.Helping.build_exchange(self, population)
      return exchange._replace(
        row_specs={'embeding': tf.TensorSpec([3], tf.float32)}
      )

    error = self._check(
      self._changed(two_sets.Helping, build_exchange=build),
      'uploads has embedding;',
      'declares embeding',
    )
    assert isinstance(error, hparams_lib.UsageError)

  def test_of_what_steps_move_and_read(self):
    """In the graph's code: the error also shows the algorithm's own line."""
    plain = two_sets.Switching.step

    def move(self, networks, batch):
      result = plain(self, networks, batch)
      networks.descend('teacher', result.gradients)
      return result

    def read(self, networks, batch):
      return plain(self, networks, batch._replace(streams=batch.streams['un']))

    self._check(
      self._changed(step=move),
      "Networks.descend='teacher'",
      'trained networks: model',
    )
    self._check(
      self._changed(step=read), "'un': there is no such name", 'unlabeled'
    )


class TestCollisions:
  """A name that stands for two things is an error when the process is built."""

  @staticmethod
  def _check(algorithm, name, what, **hparams):
    with pytest.raises(Exception, match=f"'{name}' is the name of two {what}"):
      two_sets.build(algorithm, **hparams)

  @pytest.mark.parametrize('name', ['model', 'place'])
  def test_of_networks(self, name):
    class Changed(two_sets.Switching):
      def networks(self):
        return {**super().networks(), name: base.AuxiliaryNetwork()}

    self._check(Changed(), name, 'networks or channels')

  def test_of_memory(self):
    class Memory(NamedTuple):
      average: Weights

    class Changed(base.Algorithm):
      name = 'changed'

      def initial_state(self, weights, setup):
        return base.ServerState(weights, Memory(weights))

    self._check(Changed(), 'average', 'sets', average_decay=0.5)

  def test_of_what_clients_receive(self):
    class Changed(two_sets.Helping):
      def build_exchange(self, population):
        exchange = super().build_exchange(population)
        receive = lambda *of: {**exchange.receive(*of), 'psi': tf.zeros([2])}
        return exchange._replace(receive=receive)

    self._check(Changed(), 'psi', 'values that clients receive')

  @pytest.mark.parametrize(
    'where, name',
    [
      ('prepare', 'num_examples'),
      ('prepare', 'student_divergence'),
      ('finish', 'aggregation_weight_max'),
    ],
  )
  def test_of_metrics(self, where, name):
    def metrics(place):
      return {name: base.Mean.ratio(1.0, 1.0)} if place == where else {}

    class Changed(two_sets.Switching):
      def prepare(self, client):
        prepared = super().prepare(client)
        return prepared._replace(metrics=metrics('prepare'))

      def finish(self, client, metrics_of_steps):
        output = super().finish(client, metrics_of_steps)
        return output._replace(metrics=metrics('finish'))

    self._check(Changed(), name, 'metrics')
