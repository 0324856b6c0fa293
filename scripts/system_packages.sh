#!/bin/sh
# Installs the Debian packages that the set-up needs or, without root, prints the command that installs them.
#   install         packages for building, the software Metal device, the NEON tests and the macOS build
#   has-softmetal   exits with 0 if the software Metal device can be built here
set -eu

gcc_major() { g++ -dumpversion 2>/dev/null | cut -d. -f1; }

# Prints the major version of the installed GCC or, without one, of the GCC that the package g++ will install. libobjc
# must have the same version.
objc_major() {
  ! command -v g++ >/dev/null || { gcc_major; return; }
  of_package=$(apt-cache depends g++ 2>/dev/null | sed -n 's/.*Depends: g++-\([0-9]*\)$/\1/p' | head -n 1)
  echo "${of_package:-12}"
}

has_softmetal() {
  [ "$(uname -s)" = Linux ] && command -v clang++-19 >/dev/null && command -v addr2line >/dev/null &&
    [ -e "/usr/lib/gcc/$(uname -m)-linux-gnu/$(gcc_major)/include/objc/objc.h" ] &&
    [ -e "/usr/lib/$(uname -m)-linux-gnu/libBlocksRuntime.so" ]
}

missing() {
  command -v g++ >/dev/null || echo g++
  "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
  "${PYTHON:-python3}" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
  command -v cmake >/dev/null || echo cmake
  command -v qemu-aarch64-static >/dev/null || echo qemu-user-static
  command -v aarch64-linux-gnu-g++ >/dev/null || echo g++-aarch64-linux-gnu
  command -v ld64.lld-19 >/dev/null || echo lld-19
  command -v llvm-nm-19 >/dev/null || echo llvm-19
  has_softmetal || echo "clang-19 libobjc-$(objc_major)-dev libblocksruntime-dev binutils"
}

case "$1" in
  has-softmetal) has_softmetal ;;
  install)
    [ "$(uname -s)" = Linux ] || exit 0
    packages=$(missing | tr '\n' ' ')
    [ -n "$packages" ] || exit 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq
      packages=$(missing | tr '\n' ' ')  # apt-cache knows the version of g++ only after the update
      echo "== installing Debian packages: $packages"
      # shellcheck disable=SC2086  # a list of names
      DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
    else
      echo "== these Debian packages are missing; install them with:"
      echo "   sudo apt-get install --no-install-recommends $packages"
    fi
    ;;
  *) echo "usage: system_packages.sh install | has-softmetal" >&2; exit 2 ;;
esac
