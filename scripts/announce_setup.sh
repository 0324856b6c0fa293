#!/bin/sh
# Prints the download size and the duration of make's set-up before it starts. The sizes are from November 2026, for
# Python 3.11 on x86-64. The compile time is an estimate from the processor time of a sample of the files.
#   announce_setup.sh PYTHON TORCH_INDEX    TORCH_INDEX is empty for pip's usual build of PyTorch
set -eu
[ "$(uname -s)" = Linux ] || exit 0
if "$1" -c 'import torch' 2>/dev/null; then
  exit 0  # torch, the largest download, is already installed
elif [ -n "$2" ]; then
  echo "== fetches about 0.5 GB: PyTorch for CPUs 0.2 GB (from $2),"
  echo "   packages for development 0.3 GB; and compilers from Debian, at most 0.3 GB, where they are missing."
  echo "   \`make TORCH_INDEX=\` takes the build of PyTorch that pip takes by itself: with CUDA it is 2.7 GB."
else
  echo "== fetches about 3.0 GB: PyTorch as pip takes it by itself 2.7 GB (with CUDA, which nothing here uses),"
  echo "   packages for development 0.3 GB; and compilers from Debian, at most 0.3 GB, where they are missing."
  echo "   Without TORCH_INDEX= make takes PyTorch's build for CPUs: 0.2 GB instead of 2.7."
fi
echo "   Then it compiles about 110 files: some 5 minutes on two cores."
