"""A stand-in for the training program: writes tables, and trains nothing.

The validation accuracy in round r of 10 with learning rate x and seed s is
x r / 10 + s / 100, and that of the test set 0.1 more. It resumes from its
table, and SIGTERM ends it after the round.

$FAKE_FAILURES: how often the run of a learning rate fails, after a round:
  {"0.1": 2}.
$FAKE_DIVERGES: the learning rate whose run can use no update.
$FAKE_WAITS: the learning rate whose run waits for SIGTERM after round 3.
$FAKE_TOGETHER: a folder in which the first run waits for another one, and which
  tells how many there are at a time.
"""

import fcntl
import json
import os
import signal
import sys
import time

_PATIENCE_SECS = 60


def wait(is_over):
  deadline = time.monotonic() + _PATIENCE_SECS
  while not is_over():
    if time.monotonic() > deadline:
      sys.exit('error: nothing happened')
    time.sleep(0.01)


stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))

flags = dict(argument[2:].split('=', 1) for argument in sys.argv[1:])
folder, rate = flags['output_dir'], flags['client_learning_rate']
rounds = int(flags['total_rounds'])
os.makedirs(os.path.join(folder, 'metrics'), exist_ok=True)
lock = open(os.path.join(folder, '.lock'), 'a')
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
with open(os.path.join(folder, 'flags.txt'), 'w') as file:
  file.writelines(f'--{name}={value}\n' for name, value in flags.items())
with open(os.path.join(folder, 'starts'), 'a') as file:
  file.write('start\n')
with open(os.path.join(folder, 'starts')) as file:
  starts = len(file.readlines())
failures = json.loads(os.environ.get('FAKE_FAILURES', '{}'))

together = os.environ.get('FAKE_TOGETHER')
if together:
  mine = os.path.join(together, f'running-{os.getpid()}')
  open(mine, 'w').close()

  def count():
    running = sum(name.startswith('running') for name in os.listdir(together))
    with open(os.path.join(together, 'counts'), 'a') as file:
      file.write(f'{running}\n')
    return running

  wait(lambda: count() > 1 or os.path.exists(os.path.join(together, 'over')))

eval_csv = os.path.join(folder, 'metrics', 'eval.csv')
if not os.path.exists(eval_csv):
  with open(eval_csv, 'w') as file:
    file.write('round,test/accuracy,validation/accuracy\n')
with open(eval_csv) as file:
  done = len(file.readlines()) - 1
for r in range(done + 1, rounds + 1):
  accuracy = float(rate) * r / 10 + int(flags['seed']) / 100
  with open(eval_csv, 'a') as file:
    file.write(f'{r},{accuracy + 0.1!r},{accuracy!r}\n')
  print(f'round {r}', flush=True)
  if r == 3 and rate == os.environ.get('FAKE_WAITS'):
    wait(lambda: stopped)
  if starts <= failures.get(rate, 0):
    sys.exit('error: the disk is full')
  if rate == os.environ.get('FAKE_DIVERGES'):
    print('error: no update could be used')
    sys.exit(3)
  if stopped and r < rounds:
    print('Stopped and saved.')
    sys.exit(143)
with open(os.path.join(folder, 'metrics', 'train.csv'), 'w') as file:
  file.write(f'round\n{rounds}\n')
if together:
  open(os.path.join(together, 'over'), 'w').close()
  os.unlink(mine)
