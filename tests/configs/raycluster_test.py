"""configs/raycluster.yaml fits the locked Ray, and asks for a token."""

import re

import pytest

yaml = pytest.importorskip('yaml')


def test_versions_and_tokens(repository):
  text = (repository / 'configs' / 'raycluster.yaml').read_text()
  spec = yaml.safe_load(text)['spec']
  lock = (repository / 'requirements-ray.txt').read_text()
  assert f'\nray=={spec["rayVersion"]} ' in lock
  secret = re.search(
    r'create secret generic (\S+) --from-literal=(\w+)=',
    (repository / 'docs' / 'scaling.md').read_text(),
  )
  groups = [spec['headGroupSpec'], *spec['workerGroupSpecs']]
  for group in groups:
    for container in group['template']['spec']['containers']:
      given = {variable['name']: variable for variable in container['env']}
      assert given['RAY_AUTH_MODE']['value'] == 'token'
      reference = given['RAY_AUTH_TOKEN']['valueFrom']['secretKeyRef']
      assert (reference['name'], reference['key']) == secret.groups()
      assert container['volumeMounts'][0]['mountPath'] == '/data'
  # Clients run on workers, not where the program runs.
  assert spec['headGroupSpec']['rayStartParams']['num-cpus'] == '0'
