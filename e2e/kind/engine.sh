# A docker engine of our own for the time of a cluster, in its own network and
# mount namespace: the host keeps its bridges, its packet filter, its forwarding
# and its ports. What it does to the kernel all the same is written down before
# and put back. Images stay between runs, in the cache.
#
# To be sourced after ../cluster/lib.sh, with $cluster and $cache set.

# The kubelets in the nodes write these, and they are the whole machine's.
sysctls="vm/overcommit_memory kernel/panic kernel/panic_on_oops fs/file-max fs/nr_open"
host_paths="/lib/modules /etc/docker /etc/docker/key.json /opt/containerd /run/docker /run/containerd"

# What to put before a command, so that it runs where the cluster's addresses
# are. With the docker of the machine that is here.
inside() {
  [ ! -e "$cluster/proc/holder" ] \
    || echo "nsenter --net=/proc/$(cat "$cluster/proc/holder/pid")/ns/net env DOCKER_HOST=unix://$cluster/docker.sock"
}

engine_up() {
  mkdir -p "$cluster/before"
  for key in $sysctls; do cat "/proc/sys/$key" > "$cluster/before/${key//\//.}"; done
  for path in $host_paths; do [ -e "$path" ] || echo "$path" >> "$cluster/before/absent"; done

  define holder unshare --net --mount --propagation slave sleep infinity
  start holder
  wait_for "the engine's namespaces" 10 separated
  $(inside) ip link set lo up
  # The one on the data is left to a process of its own: two would destroy them.
  define dockerd nsenter --net --mount --target "$(cat "$cluster/proc/holder/pid")" \
    flock --no-fork --nonblock "$cache/docker.lock" \
    env PATH=/usr/sbin:/usr/bin:/sbin:/bin dockerd --data-root="$cache/docker" --exec-root="$cluster/engine" \
    --pidfile="$cluster/dockerd.pid" --host="unix://$cluster/docker.sock" --storage-driver=overlay2 \
    --add-runtime="confined=$here/runc-wrapper" --default-runtime=confined \
    --default-address-pool=base=172.30.0.0/16,size=24 --bip=172.31.0.1/24
  start dockerd
  export DOCKER_HOST=unix://$cluster/docker.sock
  wait_for "docker (is another cluster up?)" 30 docker version
  # What a run that was killed has left in the data.
  remove_containers
}

separated() {
  local net
  net=$(readlink "/proc/$(cat "$cluster/proc/holder/pid")/ns/net")
  [ -n "$net" ] && [ "$net" != "$(readlink /proc/self/ns/net)" ]
}

remove_containers() {
  docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes > /dev/null 2>&1
  docker volume prune --force > /dev/null
}

engine_down() {
  if alive dockerd; then
    DOCKER_HOST=unix://$cluster/docker.sock remove_containers
    stop dockerd TERM 20
  fi
  stop holder
  find /sys/fs/cgroup -depth -type d -path '*/docker*' -exec rmdir {} + 2> /dev/null || true
  for name in $sysctls; do
    [ ! -e "$cluster/before/${name//\//.}" ] || cat "$cluster/before/${name//\//.}" > "/proc/sys/$name"
  done
  for path in $(cat "$cluster/before/absent" 2> /dev/null); do rm -rf "$path"; done
}
