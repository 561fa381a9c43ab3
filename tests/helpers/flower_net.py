"""A SuperLink and SuperNodes on this machine, with addresses of their own."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

# Flower's programs are beside this Python.
BINARIES = pathlib.Path(sys.executable).parent
_PATIENCE_SECS = 400


def _free_port():
  with contextlib.closing(socket.socket()) as sock:
    sock.bind(('127.0.0.1', 0))
    return sock.getsockname()[1]


def wait(is_there, what, seconds=_PATIENCE_SECS):
  """Waits until something is there, or fails."""
  end = time.monotonic() + seconds
  while not is_there():
    assert time.monotonic() < end, f'no {what} after {seconds} s'
    time.sleep(0.1)


def make_certificates(folder):
  """Makes a CA and a server's certificate for 127.0.0.1 in a new folder."""
  folder = pathlib.Path(folder)
  folder.mkdir()
  new_key = 'openssl req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1'
  (folder / 'names').write_text('subjectAltName=IP:127.0.0.1')
  for command in (
    f'{new_key} -x509 -days 2 -keyout ca.key -out ca.crt',
    f'{new_key} -keyout server.key -out server.csr',
    'openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial'
    ' -days 2 -extfile names -out server.pem',
  ):
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
  return folder


class Net:
  """Flower's processes, all ended at the end of a `with` block.

  Attributes:
    folder: The folder of their homes and logs.
  """

  def __init__(self, folder, *, pythonpath, server, certificates=None):
    """Starts nothing.

    Args:
      folder: A new folder.
      pythonpath: Where the server finds tff_fssl.
      server: The folder server/ of the app.
      certificates: A result of `make_certificates`, for TLS. None: without it.
    """
    self.folder = pathlib.Path(folder)
    self.folder.mkdir()
    self._pythonpath, self._server = pythonpath, str(server)
    self._certificates = certificates
    self._port = _free_port()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.kill('')

  def start_link(self):
    """Starts the SuperLink."""
    security = ['--insecure']
    if self._certificates:
      security = [
        *('--ssl-ca-certfile', self._certificates / 'ca.crt'),
        *('--ssl-certfile', self._certificates / 'server.pem'),
        *('--ssl-keyfile', self._certificates / 'server.key'),
      ]
    self._start(
      'link',
      'flower-superlink',
      *security,
      *('--host', '127.0.0.1', '--port', self._port),
      '--disable-runtime-dependency-installation',
    )
    wait(self._listens, 'SuperLink')

  def start_node(self, name, config):
    """Starts a SuperNode with a node configuration."""
    security = ['--insecure']
    if self._certificates:
      security = ['--root-certificates', self._certificates / 'ca.crt']
    self._start(
      name,
      'flower-supernode',
      *security,
      *('--superlink', f'127.0.0.1:{self._port}'),
      *('--host', '127.0.0.1', '--port', _free_port()),
      *('--node-config', config),
    )

  def run(self, app, config):
    """Starts a run of an app."""
    security = 'insecure = true'
    if self._certificates:
      security = f'root-certificates = "{self._certificates / "ca.crt"}"'
    home = self.folder / 'run'
    home.mkdir(exist_ok=True)
    (home / 'config.toml').write_text(
      f'[superlink.x]\naddress = "127.0.0.1:{self._port}"\n{security}\n'
    )
    self._start('run', 'flwr', 'run', app, 'x', '--run-config', config)

  def kill(self, name):
    """Ends the processes of a name, or all, and those that they started."""
    home = os.fsencode(f'FLWR_HOME={self.folder / name}')
    for process in pathlib.Path('/proc').glob('[0-9]*'):
      with contextlib.suppress(OSError):
        values = (process / 'environ').read_bytes().split(b'\0')
        if any(v == home or v.startswith(home + b'/') for v in values):
          os.kill(int(process.name), signal.SIGKILL)

  def logs(self):
    """Returns all logs, for messages."""
    return '\n'.join(
      f'--- {path.name}\n{path.read_text()[-3000:]}'
      for path in sorted(self.folder.glob('*.log'))
    )

  def _listens(self):
    with contextlib.closing(socket.socket()) as sock:
      return sock.connect_ex(('127.0.0.1', self._port)) == 0

  def _start(self, name, program, *arguments):
    home = self.folder / name
    home.mkdir(exist_ok=True)
    environment = {
      **os.environ,
      'FLWR_HOME': str(home),
      'FLWR_TELEMETRY_ENABLED': '0',
      'FLWR_DISABLE_UPDATE_CHECK': '1',
      'PATH': f'{BINARIES}{os.pathsep}{os.environ["PATH"]}',
      'PYTHONPATH': self._pythonpath if name == 'link' else '',
    }
    if name == 'link':
      environment['FSSL_SERVER'] = self._server
    with open(self.folder / f'{name}.log', 'ab') as log:
      subprocess.Popen(
        [str(BINARIES / program), *map(str, arguments)],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
