# Runs a separate docker engine for a cluster, in its own network and mount namespace, so that the host's
# bridges, packet filter, forwarding and ports do not change. Kernel settings that it changes are saved
# and restored. Images are kept in the cache between runs.
#
# To be sourced after ../cluster/lib.sh, with $cluster and $cache set.

# Machine-wide settings that the kubelets in the nodes change.
sysctls="vm/overcommit_memory kernel/panic kernel/panic_on_oops fs/file-max fs/nr_open"
host_paths="/lib/modules /etc/docker /etc/docker/key.json /opt/containerd /run/docker /run/containerd"

# Prints the prefix that runs a command in the network namespace of the cluster. It is empty if the
# machine's own docker is used.
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
  # A lock on the data, because two engines at once would destroy it.
  define dockerd nsenter --net --mount --target "$(cat "$cluster/proc/holder/pid")" \
    flock --no-fork --nonblock "$cache/docker.lock" \
    env PATH=/usr/sbin:/usr/bin:/sbin:/bin dockerd --data-root="$cache/docker" --exec-root="$cluster/engine" \
    --pidfile="$cluster/dockerd.pid" --host="unix://$cluster/docker.sock" --storage-driver=overlay2 \
    --add-runtime="confined=$here/runc-wrapper" --default-runtime=confined \
    --default-address-pool=base=172.30.0.0/16,size=24 --bip=172.31.0.1/24
  start dockerd
  export DOCKER_HOST=unix://$cluster/docker.sock
  wait_for "docker (is another cluster up?)" 30 docker version
  # Removes containers of a run that was killed.
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
