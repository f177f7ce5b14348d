# Reshapes the slices of a node with Divvy (an array) as NVIDIA's DRA driver publishes the same GPUs.
#
# Source of the shape: kubernetes-sigs/dra-driver-nvidia-gpu at 95932046 (v0.5.0-dev, 2026-08-07), in
# cmd/gpu-kubelet-plugin: deviceinfo.go and mig.go (attributes, capacities), partitions.go (counters)
# and driver.go (slices, for Kubernetes 1.35 and later).
#
#   $mig   false: the default, a slice of whole GPUs without counters. true: with its feature gate
#          DynamicMIG, counter sets in one slice, then for each GPU a slice with the whole GPU and all
#          MIG placements, sorted by name.

def is($type): .attributes.type.string == $type;

# Names as a capacity and as a counter.
def dimensions: {
  multiprocessors: "multiprocessors", copyEngines: "copy-engines", decoders: "decoders", encoders: "encoders",
  jpegEngines: "jpeg-engines", ofaEngines: "ofa-engines", memory: "memory"
};

# Counters of a capacity map, and the memory slices among counters of Divvy. Amounts of zero are published
# and counted too, which Divvy leaves out.
def counters($capacity; $divvy):
  (dimensions | with_entries({key: .value, value: {value: $capacity[.key].value}}))
  + ($divvy | with_entries(select(.key | startswith("memory-slice-"))));

def base: {name, attributes: (.attributes | del(.mode, .nvlinkGroup, .nvlinkPeers))};

def whole: base + {capacity: {memory: .capacity.memory}};

# The totals of a GPU: the capacities of its largest instance. Divvy publishes only the counters that restrict
# instances.
def totals($set; $devices):
  ([$devices[] | select(is("mig") and .consumesCounters[0].counterSet == $set.name) | .capacity]
    | max_by(.multiprocessors.value | tonumber)) as $largest
  | dimensions | with_entries(.value = {value: $largest[.key].value});

# With DynamicMIG a whole GPU has these totals as capacities, and consumes all counters.
def divisible_whole($set; $totals): base + {
  capacity: $totals, consumesCounters: [{counterSet: $set.name, counters: counters($totals; $set.counters)}]
};

def instance: .consumesCounters[0] as $divvy | base + {
  capacity, consumesCounters: [{counterSet: $divvy.counterSet, counters: counters(.capacity; $divvy.counters)}]
};

. as $slices
| [.[].spec.devices // [] | .[]] as $devices
| [.[].spec.sharedCounters // [] | .[] | . as $set | {name, counters: counters(totals($set; $devices); .counters)}] as $sets
| (if $mig then
    [{sharedCounters: $sets}] + [$sets[] | . as $set | {devices: ([$devices[]
      | select(.consumesCounters[0].counterSet == $set.name)
      | if is("gpu") then divisible_whole($set; totals($set; $devices)) elif is("mig") then instance else empty end] | sort_by(.name))}]
  else
    [{devices: [$devices[] | select(is("gpu")) | whole] | sort_by(.name)}]
  end) as $contents
| range($contents | length) as $at
| ($slices[0].metadata | (.name, .generateName) |= sub("^[0-9]*-gpu.divvy.dev"; "0000\($at)-gpu.nvidia.com")) as $metadata
| {apiVersion: "resource.k8s.io/v1", kind: "ResourceSlice", $metadata, spec: ({
    driver: "gpu.nvidia.com", nodeName: $slices[0].spec.nodeName,
    pool: {name: $slices[0].spec.pool.name, generation: 1, resourceSliceCount: ($contents | length)}
  } + $contents[$at])}
