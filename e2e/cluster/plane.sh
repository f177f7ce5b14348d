# Starts the control plane, and takes down a cluster without leftovers. The ports differ from the
# defaults, so that an existing cluster on this machine is not disturbed.

# On a separate bridge, so that pods and host processes can reach it at one address.
apiserver=10.88.0.1
apiserver_port=16443
etcd_port=12379
sysctls="vm/overcommit_memory kernel/panic kernel/panic_on_oops net/ipv4/ip_forward"

# Saves the machine-wide settings that kubelet and CNI change.
remember_host() {
  mkdir -p "$cluster/before"
  for key in $sysctls; do cat "/proc/sys/$key" > "$cluster/before/${key//\//.}"; done
}

add_bridge() { # add_bridge NAME ADDRESS
  ip link add "$1" type bridge
  # A fixed MAC address. Otherwise the bridge takes the lowest of its ports, which changes as pods start and end.
  ip link set "$1" address "$(cat "/sys/class/net/$1/address")"
  ip address add "$2/24" dev "$1"
  ip link set "$1" up
}

identity() { # identity NAME TOKEN: writes a kubeconfig
  cat > "$cluster/$1.kubeconfig" <<END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$apiserver:$apiserver_port", certificate-authority: $cluster/certs/apiserver.crt}}]
users: [{name: u, user: {token: $2}}]
contexts: [{name: x, context: {cluster: c, user: u, namespace: default}}]
current-context: x
END
}

start_control_plane() {
  say "starting the control plane"
  add_bridge dv0 "$apiserver"
  openssl genrsa -out "$cluster/sa.key" 2048 2> /dev/null
  local name user groups token
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

  # For all components.
  local switches=(${gates:+"--feature-gates=$gates"})
  local etcd=http://127.0.0.1:$etcd_port peer=http://127.0.0.1:$((etcd_port + 1))
  define etcd etcd --data-dir="$cluster/etcd" --name=e --unsafe-no-fsync \
    --listen-client-urls="$etcd" --advertise-client-urls="$etcd" \
    --listen-peer-urls="$peer" --initial-advertise-peer-urls="$peer" --initial-cluster="e=$peer"
  # Without kube-proxy, the API server must reach webhooks by their pods' addresses.
  define apiserver kube-apiserver --etcd-servers="$etcd" --bind-address="$apiserver" --advertise-address="$apiserver" \
    --secure-port="$apiserver_port" --cert-dir="$cluster/certs" --service-cluster-ip-range=10.96.0.0/16 \
    --service-account-key-file="$cluster/sa.key" --service-account-signing-key-file="$cluster/sa.key" \
    --service-account-issuer=https://kubernetes.default.svc --token-auth-file="$cluster/tokens.csv" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --endpoint-reconciler-type=none --enable-aggregator-routing=true --kubelet-preferred-address-types=InternalIP \
    "${switches[@]}"
  define kcm kube-controller-manager --kubeconfig="$cluster/admin.kubeconfig" --use-service-account-credentials=false \
    --service-account-private-key-file="$cluster/sa.key" --root-ca-file="$cluster/certs/apiserver.crt" \
    --leader-elect=false --bind-address=127.0.0.1 --secure-port=11257 --flex-volume-plugin-dir="$cluster/flex" \
    "${switches[@]}"
  define scheduler kube-scheduler --kubeconfig="$cluster/scheduler.kubeconfig" --leader-elect=false \
    --bind-address=127.0.0.1 --secure-port=11259 "${switches[@]}"
  start etcd
  wait_for etcd 30 curl -sf "$etcd/health"
  start apiserver
  wait_for apiserver 60 api_ready
  start kcm
  start scheduler
}

api_ready() { [ "$(kubectl get --raw /readyz)" = ok ]; }

# Stops everything, dependents first.
teardown() {
  say "taking the cluster down"
  export KUBECONFIG=$cluster/admin.kubeconfig
  local node dir name
  for dir in "$cluster"/*/cgroup; do
    [ -e "$dir" ] || continue
    node=$(basename "$(dirname "$dir")")
    [ ! -e "$cluster/$node/ns/mnt" ] || power_off "$node"
  done
  for name in scheduler kcm apiserver etcd; do stop "$name"; done
  unmount_below "$cluster"
  for dir in "$cluster"/*/cgroup; do
    [ -e "$dir" ] || continue
    for group in $(controllers); do rmdir "$group$(cat "$dir")" 2> /dev/null || true; done
  done
  for name in dv0 dv1 dv2; do ip link del "$name" 2> /dev/null || true; done
  for name in $sysctls; do
    [ ! -e "$cluster/before/${name//\//.}" ] || cat "$cluster/before/${name//\//.}" > "/proc/sys/$name"
  done
  rm -rf "$cluster"
}
