"""Runs the server of an app without TensorFlow Federated, clients in process.

    python serve_alone.py APP DATA [MODE]

DATA has CLIENT.npz for each client. MODE: 'stop' fails in the second round that
it runs; with 'lie', client 1 sends NaN; with 'die', it is silent from round 3
on.
"""

import os
import sys

for _name in ('tensorflow_federated', 'flwr'):
  sys.modules[_name] = None  # It cannot be imported.


def main(app, data, mode=''):
  import numpy as np
  import tensorflow as tf

  tf.config.threading.set_intra_op_parallelism_threads(
    int(os.environ['THREADS'])
  )
  sys.path[:0] = [os.path.join(app, 'app')]
  import fake_clients
  from fssl_app import load_client
  from fssl_app import work

  from tff_fssl.program.deploy import server

  # Clients have the app alone.
  clients = fake_clients.Clients(
    work.load_program(),
    lambda c: load_client.load_client({'data': os.path.join(data, f'{c}.npz')}),
  )
  rounds = set()

  def change(ask, reply):
    rounds.add(ask.about['round'])
    if mode == 'stop' and len(rounds) == 2:
      sys.exit('stopped')
    if mode == 'die' and ask.client_id == 1 and max(rounds) >= 3:
      return []
    if mode == 'lie' and (ask.about['phase'], ask.client_id) == (0, 1):
      values = [v * np.nan for v in reply.values]
      return [reply._replace(values=values)]
    return [reply]

  clients.change = change
  server.serve(os.path.join(app, 'server'), work.load_program, clients.send)


if __name__ == '__main__':
  main(*sys.argv[1:])
