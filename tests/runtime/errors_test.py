"""The errors of the runtime, and how they reach the user."""

import asyncio
import pickle

import pytest

from tff_fssl.runtime import errors

_OPERATIONS = {'federated_map_1': '(int32 -> int32)', 'federated_map_2': 'b'}


@pytest.mark.parametrize(
  'client_index, place, expected',
  [
    (None, '', 'federated_map_2 failed at the server: KeyError: 7'),
    (3, 'cpu:0', 'federated_map_2 failed at client 3 on cpu:0: KeyError: 7'),
  ],
)
def test_the_message_names_operation_and_place(client_index, place, expected):
  error = errors.ExecutionError(
    'federated_map_2', KeyError(7), client_index=client_index, place=place
  )
  assert str(error) == expected
  # Workers on other machines send it.
  copy = pickle.loads(pickle.dumps(error))
  assert type(copy) is errors.ExecutionError and str(copy) == expected
  assert (copy.operation, copy.client_index) == (
    'federated_map_2',
    client_index,
  )


def test_a_long_message_is_cut():
  error = errors.ExecutionError('op', ValueError('x' * 10_000))
  assert str(error).endswith('x ...') and len(str(error)) < 2_100


@pytest.mark.parametrize(
  'message, expected',
  [
    ('{{node federated_map_2/add}} failed', ['federated_map_2']),
    ("node 'federated_map_1/x' and {{node other/y}}", ['federated_map_1']),
    ('in function body_abc123', ['federated_map_2']),
    ('nothing is known', ['federated_map_1', 'federated_map_2']),
  ],
)
def test_the_operation_that_a_message_is_about(message, expected):
  found = errors.find_operation(
    message, _OPERATIONS, {'abc123': 'federated_map_2'}
  )
  assert found == ' or '.join(f'{n} ({_OPERATIONS[n]})' for n in expected)


def test_only_raised_errors_are_hidden_from_asyncio():
  reported = []

  async def run():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    raised = ValueError('raised')
    errors.raised_in_loop(raised)
    errors.raised_in_loop(ValueError('raised, too'))
    for error in (raised, ValueError('lost')):
      loop.call_exception_handler({'message': '', 'exception': error})

  asyncio.run(run())
  assert [str(context['exception']) for context in reported] == ['lost']
