# How the processes of a cluster are started, and how nothing of them is left.
# One `define` per process; ports lie off the defaults, so that a cluster that
# is already on this machine is not disturbed.

etcd_port=12379
apiserver_port=16443
sysctls="vm/overcommit_memory kernel/panic kernel/panic_on_oops net/ipv4/ip_forward"
shared_dirs="/var/lib/kubelet /var/lib/cni /run/containerd /var/log/containers"

# What kubelet and CNI change on the whole machine.
remember_host() {
  mkdir -p "$cluster/before"
  for key in $sysctls; do cat "/proc/sys/$key" > "$cluster/before/${key//\//.}"; done
  for dir in $shared_dirs; do [ -e "$dir" ] || echo "$dir" >> "$cluster/before/absent"; done
}

identity() { # identity NAME TOKEN: its kubeconfig
  cat > "$cluster/$1.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$apiserver_port", certificate-authority: $cluster/certs/apiserver.crt}}]
users: [{name: u, user: {token: $2}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: default}}]
current-context: x
END
}

start_control_plane() {
  say "starting the control plane"
  openssl genrsa -out "$cluster/sa.key" 2048 2> /dev/null
  local line name user groups token
  while read -r name user groups; do
    token=$(openssl rand -hex 16)
    echo "$token,$user,$user,\"$groups\"" >> "$cluster/tokens.csv"
    identity "$name" "$token"
  done <<END
admin admin system:masters
scheduler system:kube-scheduler system:authenticated
n1 system:node:n1 system:nodes
n2 system:node:n2 system:nodes
divvy system:serviceaccount:divvy:divvy-node system:serviceaccounts
END
  chmod 600 "$cluster"/*.kubeconfig "$cluster/tokens.csv"
  export KUBECONFIG=$cluster/admin.kubeconfig

  local etcd=http://127.0.0.1:$etcd_port peer=http://127.0.0.1:$((etcd_port + 1))
  define etcd etcd --data-dir="$cluster/etcd" --name=e --unsafe-no-fsync \
    --listen-client-urls="$etcd" --advertise-client-urls="$etcd" \
    --listen-peer-urls="$peer" --initial-advertise-peer-urls="$peer" --initial-cluster="e=$peer"
  define apiserver kube-apiserver --etcd-servers="$etcd" --bind-address=127.0.0.1 --advertise-address=127.0.0.1 \
    --secure-port="$apiserver_port" --cert-dir="$cluster/certs" --service-cluster-ip-range=10.96.0.0/16 \
    --service-account-key-file="$cluster/sa.key" --service-account-signing-key-file="$cluster/sa.key" \
    --service-account-issuer=https://kubernetes.default.svc --token-auth-file="$cluster/tokens.csv" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --endpoint-reconciler-type=none
  define kcm kube-controller-manager --kubeconfig="$cluster/admin.kubeconfig" --use-service-account-credentials=false \
    --service-account-private-key-file="$cluster/sa.key" --root-ca-file="$cluster/certs/apiserver.crt" \
    --leader-elect=false --bind-address=127.0.0.1 --secure-port=11257 --flex-volume-plugin-dir="$cluster/flex"
  define scheduler kube-scheduler --kubeconfig="$cluster/scheduler.kubeconfig" --leader-elect=false \
    --bind-address=127.0.0.1 --secure-port=11259
  start etcd
  wait_for etcd 30 curl -sf "$etcd/health"
  start apiserver
  wait_for apiserver 60 api_ready
  start kcm
  start scheduler
}

api_ready() { [ "$(kubectl get --raw /readyz)" = ok ]; }

controllers() { # directories in which a cgroup of a node has to be made
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else ls -d /sys/fs/cgroup/*/; fi
}

start_node() { # start_node NAME NUMBER GPUS
  local node=$1 number=$2 gpus=$3 dir=$cluster/$1
  say "starting node $node with $gpus"
  mkdir -p "$dir"/{cdi,cni,podlogs,kubelet,volumeplugins}
  : > "$dir/resolv.conf"
  "$target/debug/divvy-sim" up --gpus "$gpus" --seed "$number" "$dir/gpus" > /dev/null

  local group cgroup=/dv$number-${cluster##*/}
  for group in $(controllers); do
    mkdir -p "$group$cgroup"
    for file in cpuset.cpus cpuset.mems; do
      # cgroup v1 starts a cpuset empty, and then nothing may run in it.
      [ ! -e "$group/cgroup.procs" ] || [ ! -s "$group/$file" ] || cat "$group/$file" > "$group$cgroup/$file"
    done
  done
  echo "$cgroup" >> "$cluster/before/cgroups"

  # The simulated driver's state reaches containers here and nowhere else.
  define "$node-containerd" containerd --config "$dir/containerd.toml"
  ctr oci spec 2> /dev/null | jq --arg state "$dir/gpus/run/divvy-sim" \
    '.mounts += [{destination: "/run/divvy-sim", source: $state, type: "bind", options: ["rbind", "rw"]}]' > "$dir/base.json"
  cat > "$dir/containerd.toml" <<END
version = 3
root = "$dir/ctrd-root"
state = "$dir/ctrd-state"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "$dir/containerd.sock"
[ttrpc]
  address = "$dir/containerd.sock.ttrpc"
[plugins.'io.containerd.internal.v1.opt']
  path = "$dir/opt"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "localhost/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  cdi_spec_dirs = ["$dir/cdi"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["$bin"]
  conf_dir = "$dir/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "$dir/base.json"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = "$bin/runc"
  SystemdCgroup = false
  Root = "$dir/runc-root"
END
  cat > "$dir/cni/10-dv.conflist" <<END
{"cniVersion":"1.0.0","name":"dv$number","plugins":[{"type":"bridge","bridge":"dv$number","isGateway":true,"ipMasq":false,
 "ipam":{"type":"host-local","dataDir":"$dir/cni-ipam","ranges":[[{"subnet":"10.88.$number.0/24"}]]}}]}
END
  cat > "$dir/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: 1635$number
healthzPort: 1634$number
readOnlyPort: 0
containerRuntimeEndpoint: unix://$dir/containerd.sock
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
resolvConf: $dir/resolv.conf
evictionHard: {memory.available: 100Mi, nodefs.available: "1%", imagefs.available: "1%"}
imageGCHighThresholdPercent: 100
podLogsDir: $dir/podlogs
volumePluginDir: $dir/volumeplugins
END
  define "$node-kubelet" kubelet --config="$dir/kubelet.yaml" --kubeconfig="$cluster/$node.kubeconfig" \
    --root-dir="$dir/kubelet" --hostname-override="$node" --cert-dir="$dir/kubelet-pki" --v=2
  define "$node-driver" "$target/debug/divvy-node" --node-name="$node" --kubeconfig="$cluster/divvy.kubeconfig" \
    --kubelet-root="$dir/kubelet" --cdi-dir="$dir/cdi" --driver-root="$dir/gpus" --dev-root="$dir/gpus" \
    --proc-root="$dir/gpus/proc" --sys-root="$dir/gpus/sys" --run-dir="$dir/run" --hook="$hook" --http-address="127.0.0.1:1636$number" --mig-hold-off=2s

  echo "http://127.0.0.1:1636$number/readyz" > "$dir/readyz"

  start "$node-containerd"
  wait_for "containerd of $node" 30 ctr -a "$dir/containerd.sock" version
  ctr -a "$dir/containerd.sock" -n k8s.io images import "$cluster/image.tar" > "$dir/import.log" 2>&1
  start "$node-kubelet"
}

# Ends everything, in the order in which nobody waits for somebody gone.
teardown() {
  say "taking the cluster down"
  export KUBECONFIG=$cluster/admin.kubeconfig
  local name dir pid link
  if alive apiserver; then
    # While the drivers run, so that GPUs are given back.
    timeout 60 kubectl delete pods --all --all-namespaces --grace-period=1 > /dev/null 2>&1 || true
  fi
  for name in n1-driver n2-driver n1-kubelet n2-kubelet; do stop "$name"; done
  for name in n1 n2; do "$here/ctl" "$cluster" power-off "$name"; done
  for name in scheduler kcm apiserver etcd; do stop "$name"; done
  unmount_below "$cluster"
  for link in dv1 dv2; do ip link del "$link" 2> /dev/null || true; done
  for dir in $(cat "$cluster/before/cgroups" 2> /dev/null); do
    for group in $(controllers); do
      # Deepest first; a group goes when its last process has.
      find "$group$dir" -depth -type d -exec rmdir {} + 2> /dev/null || true
    done
  done
  for name in $sysctls; do
    [ ! -e "$cluster/before/${name//\//.}" ] || cat "$cluster/before/${name//\//.}" > "/proc/sys/$name"
  done
  rm -f /var/lib/cni/results/dv[12]-*
  find /var/log/containers -xtype l -delete 2> /dev/null || true
  for dir in $(cat "$cluster/before/absent" 2> /dev/null); do rm -rf "$dir"; done
  rm -rf "$cluster"
}
