import pytest

from tff_fssl.hparams import UsageError
from tff_fssl.interface import setup as setup_lib


def test_the_number_of_clients_must_be_known_where_they_have_ids():
  assert setup_lib.Setup(num_clients=7).known_clients() == 7
  with pytest.raises(UsageError, match='num_clients=None: .* 0 to num_clients'):
    setup_lib.Setup().known_clients()
