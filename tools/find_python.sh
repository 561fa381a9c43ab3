#!/bin/sh
# Prints a Python that tff_fssl can be installed with, or says what is missing
# and fails. Usage: find_python.sh [PYTHON]

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

version='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 12))'
venv='import ensurepip, venv'
without_venv=
# Run each candidate: pyenv leaves commands in PATH that only fail.
for python in ${1:-python3.11 python3.10 python3 python}; do
  path=$(command -v "$python" 2>/dev/null) || continue
  "$path" -c "$version" 2>/dev/null || continue
  if "$path" -c "$venv" 2>/dev/null; then
    echo "$path"
    exit 0
  fi
  without_venv=${without_venv:-$("$path" -c \
    'import sys; print("python%d.%d" % sys.version_info[:2])')}
done

[ -z "$without_venv" ] ||
  fail "$without_venv has no venv module; install it (Debian, Ubuntu:" \
    "apt-get install $without_venv-venv)."
[ -z "$1" ] ||
  fail "$1 is not Python 3.10 or 3.11; give another PYTHON=, or none."
fail "no Python 3.10 or 3.11 in PATH; install python3.11 with its venv module" \
  "(Debian, Ubuntu: apt-get install python3.11 python3.11-venv), or give" \
  "PYTHON=/path/to/python3.11."
