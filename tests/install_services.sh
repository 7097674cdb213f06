#!/bin/sh
# What some tests start: etcd, etcdctl, nats-server, ip and nft for networks of several hosts, systemd-analyze for its units, Chromium for pages, promtool for rules of Prometheus, and libfaketime for clocks that jump. Installs what is missing, on Debian and as root;
# elsewhere says so, and those tests are skipped.
set -eu

missing=""
command -v etcd > /dev/null || missing="$missing etcd-server"
command -v etcdctl > /dev/null || missing="$missing etcd-client"
command -v nats-server > /dev/null || missing="$missing nats-server"
command -v ip > /dev/null || missing="$missing iproute2"
command -v nft > /dev/null || missing="$missing nftables"
command -v systemd-analyze > /dev/null || missing="$missing systemd"
command -v chromium > /dev/null || missing="$missing chromium"
command -v promtool > /dev/null || missing="$missing prometheus"
ls /usr/lib/*/faketime/libfaketime.so.1 > /dev/null 2>&1 || missing="$missing libfaketime"
[ -n "$missing" ] || exit 0

if ! command -v apt-get > /dev/null || [ "$(id -u)" != 0 ]; then
  echo "tests that need$missing will be skipped: as root on Debian, run tests/install_services.sh"
  exit 0
fi
echo "installing$missing for the tests ..."
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq > /dev/null
# shellcheck disable=SC2086  # several words
apt-get install -y -qq --no-install-recommends $missing > /dev/null
