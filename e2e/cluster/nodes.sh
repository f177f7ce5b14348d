# A node is a mount namespace of this machine with a kubelet and a containerd. Its directories are
# mounted at the usual paths, so that default host paths work on both nodes and the machine's own
# directories are not changed:
#
#   NODE/run  (in memory)  /run       NODE/lib  /var/lib
#   NODE/etc  (a layer)    /etc       NODE/log  /var/log
#   NODE/gpus              /run/nvidia/driver, like the root of a driver container

driver_root=/run/nvidia/driver

# enter NODE COMMAND...: runs a command on a node; also used to start the node's processes.
enter() {
  local node=$1
  shift
  nsenter --mount="$cluster/$node/ns/mnt" -- "$@"
}

# Boots a node: creates an empty memory file system, and mounts its directories.
boot() { # boot NODE
  local dir=$cluster/$1
  mkdir -p "$dir"/{run,lib,etc,etc-work,log,ns}
  mount -t tmpfs -o mode=755 divvy-run "$dir/run"
  # A bind mount of its file keeps the namespace. The mount is private, as the kernel requires.
  mount --bind "$dir/ns" "$dir/ns"
  mount --make-private "$dir/ns"
  : > "$dir/ns/mnt"
  # shellcheck disable=SC2016
  unshare --mount="$dir/ns/mnt" --propagation private sh -euc '
    dir=$1 driver_root=$2
    mount -t overlay -o "lowerdir=/etc,upperdir=$dir/etc,workdir=$dir/etc-work" divvy-etc /etc
    mount --bind "$dir/run" /run
    mount --bind "$dir/lib" /var/lib
    mount --bind "$dir/log" /var/log
    mkdir -p "$driver_root"
    mount --rbind "$dir/gpus" "$driver_root"
    # As init does on a real node.
    mount --make-rshared /' boot "$dir" "$driver_root"
}

# Kills all processes of the node at once, containers too, and discards its memory.
power_off() { # power_off NODE
  local dir=$cluster/$1 group pids=
  for _ in $(seq 100); do
    pids=$(node_pids "$1")
    [ -n "$pids" ] || break
    # shellcheck disable=SC2086
    kill -KILL $pids 2> /dev/null || true
    sleep 0.05
  done
  [ -z "$pids" ] || die "cannot kill the processes of $1: $pids"
  for group in $(controllers); do
    find "$group$(cat "$dir/cgroup")" -mindepth 1 -depth -type d -exec rmdir {} + 2> /dev/null || true
  done
  unmount_below "$dir"
}

# The processes in the node's namespace, and those in its containers, which have their own namespaces.
node_pids() { # node_pids NODE
  local dir=$cluster/$1
  {
    find /proc/[0-9]*/ns/mnt -lname "mnt:\[$(stat -c %i "$dir/ns/mnt")\]" || true
    grep -lF ":$(cat "$dir/cgroup")/" /proc/[0-9]*/cgroup || true
  } 2> /dev/null | cut -d/ -f3 | sort -un
}

controllers() { # the directories in which the cgroup of a node must be created
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else ls -d /sys/fs/cgroup/*/; fi
}

start_node() { # start_node NAME NUMBER GPUS
  local node=$1 number=$2 gpus=$3 dir=$cluster/$1
  say "starting node $node with $gpus"
  mkdir -p "$dir"
  "$target/debug/divvy-sim" up --gpus "$gpus" --seed "$number" "$dir/gpus" > /dev/null

  local group cgroup=/dv$number-${cluster##*/}
  for group in $(controllers); do
    mkdir -p "$group$cgroup"
    for file in cpuset.cpus cpuset.mems; do
      # In cgroup v1 a new cpuset is empty, and no process may run in it.
      [ ! -e "$group/cgroup.procs" ] || [ ! -s "$group/$file" ] || cat "$group/$file" > "$group$cgroup/$file"
    done
  done
  echo "$cgroup" > "$dir/cgroup"
  # The bridge of the node's pods has the node's address.
  add_bridge "dv$number" "10.88.$number.1"

  mkdir -p "$dir"/etc/{containerd,cni/net.d}
  # Mounts the simulated driver's state into all containers.
  ctr oci spec 2> /dev/null | jq --arg state "$driver_root/run/divvy-sim" \
    '.mounts += [{destination: "/run/divvy-sim", source: $state, type: "bind", options: ["rbind", "rw"]}]' \
    > "$dir/etc/containerd/base.json"
  cat > "$dir/etc/containerd/config.toml" <<END
version = 3
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[plugins.'io.containerd.internal.v1.opt']
  path = "/var/lib/containerd-opt"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["$bin"]
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/containerd/base.json"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = "$bin/runc"
  SystemdCgroup = false
END
  cat > "$dir/etc/cni/net.d/10-dv.conflist" <<END
{"cniVersion":"1.0.0","name":"dv$number","plugins":[{"type":"bridge","bridge":"dv$number","isDefaultGateway":true,"ipMasq":false,
 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.88.$number.0/24"}]]}}]}
END
  : > "$dir/etc/kubelet-resolv.conf"
  cat > "$dir/etc/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 10.88.$number.1
healthzPort: 1634$number
readOnlyPort: 0
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: $cgroup
failSwapOn: false
failCgroupV1: false
enforceNodeAllocatable: [pods]
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
makeIPTablesUtilChains: false
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
resolvConf: /etc/kubelet-resolv.conf
evictionHard: {memory.available: 100Mi, nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
volumePluginDir: /var/lib/kubelet/volumeplugins
syncFrequency: 10s
featureGates: {$(sed 's/=/: /g; s/,/, /g' <<< "$gates")}
END
  local on_node=(nsenter "--mount=$dir/ns/mnt" --)
  define "$node-containerd" "${on_node[@]}" containerd
  define "$node-kubelet" "${on_node[@]}" kubelet --config=/etc/kubelet.yaml --kubeconfig="$cluster/$node.kubeconfig" \
    --node-ip="10.88.$number.1" --hostname-override="$node" --v=2

  boot "$node"
  start "$node-containerd"
  wait_for "containerd of $node" 30 enter "$node" ctr version
  enter "$node" ctr -n k8s.io images import "$cluster/image.tar" > "$dir/import.log" 2>&1
  start "$node-kubelet"
}
