#!/bin/sh
# Installs the dflop of folder $1, with the tested versions, into /opt/dflop. Both container recipes call it.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# torch and Triton compile kernels while they run.
apt-get install -qq -y --no-install-recommends g++
command -v python3 > /dev/null || apt-get install -qq -y --no-install-recommends python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/dflop
/opt/dflop/bin/pip install --no-cache-dir -c "$1/constraints.txt" "$1[slurm]"
