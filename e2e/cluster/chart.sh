# Installs Divvy in the cluster as an administrator does: image, values, chart.

namespace=divvy
driver_selector=app.kubernetes.io/component=node

helm_() { # helm_ ARGUMENTS...: runs helm; {chart}, {from} and {values} are replaced by paths
  local arguments=("${@//\{chart\}/$repo/manifests/chart}")
  arguments=("${arguments[@]//\{from\}/$cluster/from/chart}")
  "$("$repo/e2e/helm/build")" --namespace "$namespace" "${arguments[@]//\{values\}/$cluster/values.yaml}"
}

build_image() { # build_image OUT.tar
  "$repo/manifests/image/build" --profile dev --name localhost/divvy:0 "$target/image-dev" > /dev/null
  cp "$target/image-dev/divvy.tar" "$1"
}

# Imports the image on the nodes, labels the nodes, and writes the values.
prepare_chart() {
  local node
  for node in n1 n2; do
    enter "$node" ctr -n k8s.io images import "$cluster/divvy.tar" > "$cluster/$node/import.log" 2>&1
    # The upgrade uses the same image under another name.
    enter "$node" ctr -n k8s.io images tag --force localhost/divvy:0 localhost/divvy:next >> "$cluster/$node/import.log" 2>&1
    [ ! -e "$cluster/from" ] || enter "$node" ctr -n k8s.io images import "$cluster/from/divvy.tar" >> "$cluster/$node/import.log" 2>&1
    kubectl label "node/$node" nvidia.com/gpu.present=true > /dev/null
  done
  # Differences from an ordinary cluster: simulated GPUs in a directory, no kube-proxy, a shorter delay before MIG
  # mode is disabled, and shares of MIG instances.
  cat > "$cluster/values.yaml" <<END
image: {repository: localhost/divvy, tag: "0"}
nvidiaDriverRoot: $driver_root
k8sServiceHost: $apiserver
k8sServicePort: "$apiserver_port"
kubeletPlugin:
  procRoot: $driver_root/proc
  sysRoot: $driver_root/sys
  migHoldOff: 2s
nodeConfig: {rules: [{migShares: true}]}
END
}

# Validates the examples and the rendered manifests on the server, except kinds of other projects.
validate_manifests() {
  local file
  kubectl create namespace "$namespace" > /dev/null
  for file in "$repo"/manifests/examples/*.yaml "$repo"/manifests/rendered/*.yaml; do
    awk 'BEGIN { RS = ORS = "\n---\n" } !/(^|\n)apiVersion: (cert-manager|monitoring\.coreos)/' "$file" |
      kubectl apply --dry-run=server -f - > /dev/null || die "the API server rejects $file"
  done
}

# Installs the version to upgrade from, if there is one. Its node configuration may lack migShares.
install_chart() {
  local chart=("{chart}")
  [ ! -e "$cluster/from" ] || chart=("{from}" --set image.tag=from --set-json "nodeConfig={}")
  helm_ install divvy "${chart[@]}" --values "{values}" --create-namespace --wait --timeout 3m > /dev/null
}

# The tests' image under the name of the examples' image, so that manifests/examples run without a registry.
offer_examples() {
  local node
  for node in n1 n2; do
    enter "$node" ctr -n k8s.io images tag --force localhost/glibc:1 docker.io/library/debian:stable-slim \
      >> "$cluster/$node/import.log" 2>&1
  done
}

driver_address() { # driver_address NODE: address of the node daemon's pod
  kubectl -n "$namespace" get pods --field-selector "spec.nodeName=$1,status.phase=Running" -l "$driver_selector" \
    -o jsonpath='{.items[*].status.podIP}'
}

driver_serves() { # driver_serves NODE
  local address
  address=$(driver_address "$1")
  [ -n "$address" ] && curl -sf -m 2 "http://${address##* }:9843/readyz"
}

# Keeps the DaemonSet from running the node daemon on a node: a pod with an anti-affinity to the daemon makes it
# unschedulable there. The MPS supervisor keeps running.
send_driver_away() { # send_driver_away NODE
  kubectl apply -f - > /dev/null <<END
apiVersion: v1
kind: Pod
metadata: {name: no-driver-on-$1, namespace: kube-system}
spec:
  nodeName: $1
  # Not below the daemon's own priority, or the daemon would preempt this pod.
  priorityClassName: system-node-critical
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  containers: [{name: pause, image: "localhost/pause:1", imagePullPolicy: Never}]
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          namespaces: [$namespace]
          labelSelector: {matchLabels: {app.kubernetes.io/component: node}}
END
  kubectl -n "$namespace" delete pods --field-selector "spec.nodeName=$1" -l "$driver_selector" "${@:2}" > /dev/null 2>&1
}

let_driver_back() { # let_driver_back NODE
  kubectl -n kube-system delete pod "no-driver-on-$1" --ignore-not-found > /dev/null
}

crash() { # crash NODE PROGRAM
  local pid
  for pid in $(node_pids "$1"); do
    # The command line is compared, because the short name is `exe`: the daemons re-execute themselves.
    [ "$(tr '\0' '\n' 2> /dev/null < "/proc/$pid/cmdline" | head -1)" != "/usr/bin/$2" ] || kill -KILL "$pid"
  done
}

# Lists all files and objects of Divvy on the nodes and in the cluster, without empty directories.
leftovers() {
  local node kind
  for node in n1 n2; do
    enter "$node" find /run/divvy /run/cdi /var/lib/kubelet/plugins /var/lib/kubelet/plugins_registry \
      \( -path '*divvy*' -o -path '/run/divvy/*' \) ! -type d -printf "$node: %p\n" 2> /dev/null || true
  done
  for kind in $(kubectl api-resources --verbs=list -o name | grep -v '^events'); do
    # Without the namespace, which the administrator created, and the objects that Kubernetes creates in it.
    kubectl get "$kind" --all-namespaces --ignore-not-found -o json |
      jq -r '.items[] | select([.metadata.name, .metadata.namespace // "", (.metadata.labels // {} | tostring)] | any(test("divvy")))
        | select(.kind != "Namespace" and .kind != "PodMetrics" and .metadata.name != "default" and .metadata.name != "kube-root-ca.crt")
        | "\(.kind) \(.metadata.name)"'
  done
}
