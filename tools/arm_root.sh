#!/usr/bin/env bash
# Makes a folder with Python 3.11 for arm64 and, in `site`, the packages that Twostroke depends on, and others: what
# qemu-user needs to run Twostroke as on an ARM processor. Nothing of the system changes.
#
#     tools/arm_root.sh FOLDER [PACKAGE ...]
set -euo pipefail
root=$(mkdir -p "$1" && cd "$1" && pwd)
apt="$root/apt"
mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
touch "$apt/status"
get() {
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=0 \
        -o Dir::State::lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
        -o Debug::NoLocking=1 "$@" 2> "$apt/errors" || { cat "$apt/errors" >&2; return 1; }
}
get update
get --yes --download-only install python3.11 libstdc++6 > "$apt/log"
for package in "$apt"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
rm -rf "$root/site"
names=$(python3 "$(dirname "$0")/requirements.py")
mapfile -t wanted <<< "$names"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --target "$root/site" \
    --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
    --python-version 3.11 --only-binary :all: "${wanted[@]}" "${@:2}"
echo "$root"
