#!/bin/sh
# Installs Debian's Slurm where it is missing. Where that cannot be, the tests say what is missing, and CI fails.
set -eu
for program in slurmctld slurmd munged; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null || missing=1
done
[ "${missing:-}" ] || exit 0
if [ "$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root=none; fi
if [ "$as_root" = none ] || ! command -v apt-get >/dev/null; then
  echo "Slurm is not installed and cannot be installed here: that takes root and apt-get" >&2
  exit 0
fi
$as_root apt-get update -qq
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
