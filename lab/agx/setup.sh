#!/bin/sh
# sh lab/agx/setup.sh [FOLDER] builds Mesa's offline compiler for the M1's GPU in a small Debian 13 in FOLDER, by
# default build/agx. It needs root on an x86-64 Debian or Ubuntu, and a Debian mirror. A second run skips what is done.
# MIRROR names the mirror (by default the first Debian mirror of apt), JOBS the processes that compile. KEEP=1 leaves
# Mesa's source in FOLDER/src.
set -eu

say() { echo "setup.sh: $*" >&2; }
die() { say "error: $*"; exit 1; }

HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${1:-$HERE/../../build/agx}
PATCH=$HERE/mesa.patch
apt_mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -v '^#' | grep -oE 'https?://[^ ]*/debian/?( |$)' |
    head -n 1 | tr -d ' '
}
MIRROR=${MIRROR:-$(apt_mirror)}
MIRROR=${MIRROR:-http://deb.debian.org/debian}
JOBS=${JOBS:-$(nproc)}
VERSION=25.0.7  # the patch is against this one

[ "$(id -u)" = 0 ] || die "run it as root: it makes a folder with a Debian of its own and enters it by chroot"
command -v mmdebstrap >/dev/null || { apt-get update -q && apt-get install -y -q --no-install-recommends mmdebstrap; } ||
  die "mmdebstrap is missing: apt-get install mmdebstrap"
[ "$(uname -m)" = x86_64 ] || say "only tried on x86-64"
mkdir -p "$(dirname "$DIR")"
DIR=$(cd "$(dirname "$DIR")" && pwd)/$(basename "$DIR")
case $DIR in *[!A-Za-z0-9/._+-]*) die "expected a path of letters, digits and ._+-, got $DIR" ;; esac
case $(findmnt -n -o OPTIONS -T "$(dirname "$DIR")" 2>/dev/null || true) in
  *nodev*|*noexec*) die "$(dirname "$DIR") is on a file system mounted nodev or noexec" ;;
esac

# Mesa is compiled with clang, too. The patch lets Mesa build without the headers of LLVM and clang.
PACKAGES=ca-certificates,clang-19,llvm-19,llvm-spirv-19,meson,ninja-build,pkgconf,patch,xz-utils,\
python3-mako,python3-yaml,python3-packaging,zlib1g-dev,libdrm-dev,libc6-dev

# Each step leaves a mark here when it is complete.
MARK=$DIR/.agx
in_root() {
  chroot "$DIR" /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 CC=clang-19 \
    CXX=clang++-19 DEBIAN_FRONTEND=noninteractive sh -euc "$1"
}

if [ ! -e "$MARK/1-chroot" ]; then
  if [ -e "$DIR" ] && [ -n "$(ls -A "$DIR" 2>/dev/null)" ]; then
    die "$DIR is not empty, and no earlier run finished its Debian: remove it or name another folder"
  fi
  say "1/3 Debian packages"
  mmdebstrap --mode=root --variant=minbase --include="$PACKAGES" --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' trixie "$DIR" "$MIRROR" ||
    die "mmdebstrap failed; remove $DIR before another try"
  mkdir -p "$MARK"
  : > "$MARK/1-chroot"
fi

# Another patch needs a fresh source.
SUM=$(sha256sum "$PATCH" | cut -d' ' -f1)
if [ "$(cat "$MARK/3-built" 2>/dev/null)" = "$SUM" ] && [ -x "$DIR/usr/local/bin/asahi_clc" ]; then
  say "the compiler is in $DIR"
  exit 0
fi

if [ "$(cat "$MARK/2-source" 2>/dev/null)" != "$SUM" ] || [ ! -d "$DIR/src/mesa" ]; then
  say "2/3 Debian's source of Mesa $VERSION, and our patch"
  rm -rf "$DIR/src" "$MARK/2-source"
  mkdir -p "$DIR/src"
  echo "deb-src $MIRROR trixie main" > "$DIR/etc/apt/sources.list.d/agx-src.list"
  in_root 'apt-get update -q
    cd /src && v=$(apt-cache showsrc --only-source mesa | sed -n "s/^Version: //p" | grep "^'"$VERSION"'-" | tail -1)
    [ -n "$v" ] || { echo "the mirror has no source of Mesa '"$VERSION"'" >&2; exit 1; }
    apt-get source -q --download-only --tar-only "mesa=$v"
    mkdir mesa && tar xf mesa_'"$VERSION"'.orig.tar.xz -C mesa --strip-components=1
    rm -rf mesa_* /var/lib/apt/lists/*; apt-get clean' > "$MARK/source.log" 2>&1 ||
    { tail -20 "$MARK/source.log" >&2; die "no source; all messages are in $MARK/source.log"; }
  in_root 'cd /src/mesa && patch -s -p1 --forward --batch' < "$PATCH" || die "the patch does not apply"
  echo "$SUM" > "$MARK/2-source"
fi

say "3/3 building with $JOBS processes"
if [ ! -e "$DIR/src/mesa/build/build.ninja" ]; then
  rm -rf "$DIR/src/mesa/build"
  in_root 'cd /src/mesa && meson setup build --wrap-mode=nodownload --buildtype=plain -Doptimization=0 -Dplatforms= \
    -Dgallium-drivers= -Dvulkan-drivers=asahi -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dopengl=false \
    -Dgles1=disabled -Dgles2=disabled -Dllvm=disabled -Dmesa-clc=system -Dprecomp-compiler=enabled -Dtools=asahi \
    -Dvideo-codecs= -Dzstd=disabled -Dvalgrind=disabled -Dlibunwind=disabled -Dshader-cache=disabled \
    -Dbuild-tests=false -Dxmlconfig=disabled -Db_ndebug=false' > "$MARK/meson.log" 2>&1 ||
    { tail -30 "$MARK/meson.log" >&2; die "meson failed; all messages are in $MARK/meson.log"; }
fi
in_root "cd /src/mesa && ninja -j$JOBS -C build src/asahi/clc/asahi_clc" > "$MARK/ninja.log" 2>&1 ||
  { tail -30 "$MARK/ninja.log" >&2; die "the build failed; all messages are in $MARK/ninja.log"; }
cp "$DIR/src/mesa/build/src/asahi/clc/asahi_clc" "$DIR/usr/local/bin/asahi_clc"
[ -n "${KEEP:-}" ] || rm -rf "$DIR/src" "$MARK/2-source"
echo "$SUM" > "$MARK/3-built"
say "done: $DIR ($(du -sm --one-file-system "$DIR" | cut -f1) MB)"
