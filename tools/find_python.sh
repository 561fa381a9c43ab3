#!/bin/sh
# Prints a Python that tff_fssl can be installed with, or says what is missing
# and fails. Where there is none, uv brings one. Usage: find_python.sh [PYTHON]

fail() {
  echo "tff_fssl: $*" >&2
  exit 1
}

[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] ||
  fail "TensorFlow Federated runs on Linux x86-64 only; this is" \
    "$(uname -s) $(uname -m). Use a Linux x86-64 machine or container."

glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
case $glibc in
  [3-9]* | 2.3[1-9]* | 2.[4-9][0-9]* | 2.[1-9][0-9][0-9]*) ;;
  *) fail "TensorFlow Federated needs glibc 2.31 or newer; this system has" \
    "${glibc:-another C library}. Use Debian 11, Ubuntu 20.04 or newer." ;;
esac

# Prints the version of a Python; fails unless it is one of ours.
version='import sys; version = sys.version_info[:2]
print("%d.%d" % version); sys.exit(not (3, 11) <= version < (3, 14))'
without_venv=
others=
# Run each candidate: pyenv leaves commands in PATH that only fail.
for python in ${1:-python3.13 python3.12 python3.11 python3 python}; do
  path=$(command -v "$python" 2>/dev/null) || continue
  if found=$("$path" -c "$version" 2>/dev/null); then
    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$path"
      exit 0
    fi
    without_venv=${without_venv:-python$found}
  elif [ -n "$found" ]; then
    others=${others:-$found}
  fi
done

needed='Python 3.11, 3.12 or 3.13'
case $others in
  '') why="no $needed" ;;
  [12].* | 3.? | 3.10) why="Python $others is too old: today's NumPy has no \
release for it; needed is $needed" ;;
  *) why="Python $others is too new: TensorFlow 2.21 has no release for it; \
needed is $needed" ;;
esac
[ -z "$without_venv" ] || why="$without_venv has no venv module"
if [ -n "$1" ]; then
  command -v "$1" >/dev/null || fail "$1 is not a command. Give another" \
    "PYTHON=, or none."
  fail "$1: $why. Give another PYTHON=, or none."
fi

# Has uv, as it is called by the arguments, print a Python that it installs.
bring() {
  "$@" --version >/dev/null 2>&1 || return 1
  echo "tff_fssl: $why; uv brings Python 3.12." >&2
  "$@" python install 3.12 >&2 &&
    UV_PYTHON_PREFERENCE=only-managed "$@" python find 3.12 ||
    fail "uv could not bring it. Install Python 3.12 with its venv module," \
      "and give PYTHON=/path/to/python3.12."
  exit
}

folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
bring uv
python3 -m pip install --quiet --target "$folder" uv >/dev/null 2>&1
bring "$folder/bin/uv"
bring pipx run uv

os_release=${OS_RELEASE:-/etc/os-release}
[ ! -r "$os_release" ] || . "$os_release"
case "$ID $VERSION_ID, $ID_LIKE" in
  'debian 12,'*) remedy='apt-get install python3.11 python3.11-venv' ;;
  'debian 13,'*) remedy='apt-get install python3.13 python3.13-venv' ;;
  'ubuntu 24.04,'*) remedy='apt-get install python3.12 python3.12-venv' ;;
  # With pip comes uv, with uv Python 3.12.
  debian* | *debian*) remedy='apt-get install python3-pip' ;;
  fedora* | *fedora*) remedy='dnf install python3.12' ;;
  *) remedy='install uv, or Python 3.12 with its venv module' ;;
esac
fail "$why. Do this, then the same again: $remedy." \
  "Or give PYTHON=/path/to/python3.12."
