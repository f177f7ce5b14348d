// Measures what the slices of a node cost their readers: their size, and times of the structured allocator of
// k8s.io/dynamic-resource-allocation, which the scheduler runs for each pod and node.
//
// Each argument is a file with the ResourceSlices of one node, as a list or one after the other. A figure is a line with
// name, value and unit, separated by tabs, and the name begins with that of the file. Times are the shortest of several
// rounds. The exit status is 1 if a figure exceeds its bound.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// The scheduler clones the allocation state for each pod. 40,000 devices are 5,000 nodes of 8 GPUs, the largest cluster
// that Kubernetes supports.
const heldDevices = 40_000

// Bounds of the clone with whole GPUs, in ms, and of a refusal on a full node without MIG devices, in us.
const (
	cloneMax   = 10
	refusalMax = 150
)

// The default features of Kubernetes 1.37.
var features = structured.Features{
	AdminAccess:            true,
	ConsumableCapacity:     true,
	DeviceBindingAndStatus: true,
	DeviceTaints:           true,
	PartitionableDevices:   true,
	PrioritizedList:        true,
}

// The slices of one node.
type node struct {
	name   string
	driver string
	slices []*resourceapi.ResourceSlice
	// Number of devices by their attribute "type".
	types map[string]int
	cache *cel.Cache
}

func load(file string) (*node, error) {
	content, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer content.Close()
	name := strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	n := &node{
		name:  strings.ReplaceAll(name, "-", "_"),
		types: map[string]int{},
		cache: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}),
	}
	documents := json.NewDecoder(content)
	for {
		var document struct {
			resourceapi.ResourceSlice
			Items []*resourceapi.ResourceSlice `json:"items"`
		}
		if err := documents.Decode(&document); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if document.Items == nil {
			document.Items = append(document.Items, &document.ResourceSlice)
		}
		n.slices = append(n.slices, document.Items...)
	}
	if len(n.slices) == 0 {
		return nil, fmt.Errorf("%s: no slices", file)
	}
	n.driver = n.slices[0].Spec.Driver
	for _, slice := range n.slices {
		slice.ManagedFields = nil
		for _, device := range slice.Spec.Devices {
			if kind := device.Attributes["type"].StringValue; kind != nil {
				n.types[*kind]++
			}
		}
	}
	return n, nil
}

// The classes by the type of their devices, with the selectors of manifests/deviceclasses.yaml.
func (n *node) List() ([]*resourceapi.DeviceClass, error) {
	var all []*resourceapi.DeviceClass
	for kind := range n.types {
		class, _ := n.Get(kind)
		all = append(all, class)
	}
	return all, nil
}

func (n *node) Get(kind string) (*resourceapi.DeviceClass, error) {
	expression := fmt.Sprintf("device.driver == '%[1]s' && device.attributes['%[1]s'].type == '%[2]s'", n.driver, kind)
	return &resourceapi.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: kind},
		Spec:       resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{selector(expression)}},
	}, nil
}

func selector(expression string) resourceapi.DeviceSelector {
	return resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}
}

// The claims that scheduler-bench creates too, by the type of their device.
func (n *node) claim(kind string) *resourceapi.ResourceClaim {
	exactly := &resourceapi.ExactDeviceRequest{
		DeviceClassName: kind,
		AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
		Count:           1,
	}
	switch kind {
	case "mig":
		expression := fmt.Sprintf("device.attributes['%s'].profile == '1g.10gb'", n.driver)
		exactly.Selectors = []resourceapi.DeviceSelector{selector(expression)}
	case "share":
		memory := map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")}
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: memory}
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: kind, Namespace: "default", UID: types.UID(kind)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: exactly}},
		}},
	}
}

// The devices that claims hold, as in pkg/scheduler/framework/plugins/dynamicresources/allocateddevices.go.
type held struct{ structured.AllocatedState }

func none() held {
	return held{structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}}
}

// Adds the device of a claim on a copy of the node. Share ids are unique.
func (h held) add(result resourceapi.DeviceRequestAllocationResult, pool string) {
	id := structured.MakeDeviceID(result.Driver, pool, result.Device)
	if result.ShareID == nil {
		h.AllocatedDevices.Insert(id)
		return
	}
	share := types.UID(fmt.Sprintf("%s-%d", *result.ShareID, len(h.AllocatedSharedDeviceIDs)))
	h.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, &share))
	if result.ConsumedCapacity != nil {
		h.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
	}
}

func (n *node) allocator(state held) (structured.Allocator, error) {
	return structured.NewAllocator(context.Background(), features, state.AllocatedState, n, n.slices, n.cache)
}

func (n *node) allocate(allocator structured.Allocator, kind string) (*resourceapi.DeviceRequestAllocationResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	object := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: *n.slices[0].Spec.NodeName}}
	found, err := allocator.Allocate(ctx, object, []*resourceapi.ResourceClaim{n.claim(kind)})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return &found[0].Devices.Results[0], nil
}

// Fills the node with claims of one kind and returns their devices.
func (n *node) fill(kind string) ([]resourceapi.DeviceRequestAllocationResult, held, error) {
	state := none()
	var results []resourceapi.DeviceRequestAllocationResult
	for {
		allocator, err := n.allocator(state)
		if err != nil {
			return nil, state, err
		}
		result, err := n.allocate(allocator, kind)
		if err != nil || result == nil {
			return results, state, err
		}
		results = append(results, *result)
		state.add(*result, result.Pool)
	}
}

// The processor time of a call, the shortest of several rounds. It depends less on the load of the machine than wall
// time. Each round starts after a collection of garbage, so that it does not collect that of earlier ones.
func shortest(calls int, call func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	best := time.Duration(1 << 62)
	for range 25 {
		runtime.GC()
		begun := threadTime()
		for range calls {
			call()
		}
		best = min(best, (threadTime()-begun)/time.Duration(calls))
	}
	return best
}

func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err)
	}
	return time.Duration(now.Nano())
}

func heap() uint64 {
	// The second collection frees objects whose finalizers ran in the first.
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

var missed bool

func figure(name string, value float64, unit string) {
	fmt.Printf("%s\t%.3f\t%s\n", name, value, unit)
}

func atMost(name string, value, bound float64, unit string) {
	verdict := "ok"
	if value > bound {
		verdict, missed = "MISSED", true
	}
	figure(name, value, unit)
	fmt.Printf("%s_bound\t%.3f\t%s\t%s\n", name, bound, unit, verdict)
}

func (n *node) sizes() error {
	var asJSON, devices int
	var encoded [][]byte
	for _, slice := range n.slices {
		text, err := json.Marshal(slice)
		if err != nil {
			return err
		}
		bytes, err := slice.Marshal()
		if err != nil {
			return err
		}
		asJSON += len(text)
		encoded = append(encoded, bytes)
		devices += len(slice.Spec.Devices)
	}
	protobuf := 0
	for _, bytes := range encoded {
		protobuf += len(bytes)
	}
	// Decoded from protobuf, as the informer of the scheduler does it.
	const copies = 100
	decoded := make([]resourceapi.ResourceSlice, copies*len(encoded))
	before := heap()
	for i := range decoded {
		if err := decoded[i].Unmarshal(encoded[i%len(encoded)]); err != nil {
			return err
		}
	}
	grown := heap() - before
	runtime.KeepAlive(decoded)
	figure(n.name+"_slices", float64(len(n.slices)), "count")
	figure(n.name+"_devices", float64(devices), "count")
	figure(n.name+"_json", float64(asJSON), "bytes")
	figure(n.name+"_protobuf", float64(protobuf), "bytes")
	figure(n.name+"_decoded", float64(grown)/copies, "bytes")
	return nil
}

// The clone of the allocation state that the scheduler makes for each pod, with claims of this kind on all nodes.
func (n *node) clone(kind string, results []resourceapi.DeviceRequestAllocationResult) {
	state := none()
	for i := range heldDevices {
		state.add(results[i%len(results)], fmt.Sprintf("node-%05d", i/len(results)))
	}
	took := shortest(1, func() {
		devices, shares := state.AllocatedDevices.Clone(), state.AllocatedSharedDeviceIDs.Clone()
		capacity := state.AggregatedCapacity.Clone()
		runtime.KeepAlive(devices)
		runtime.KeepAlive(shares)
		runtime.KeepAlive(capacity)
	})
	name, ms := n.name+"_clone_"+kind, float64(took.Nanoseconds())/1e6
	if kind == "gpu" {
		atMost(name, ms, cloneMax, "ms")
	} else {
		figure(name, ms, "ms")
	}
}

// The time in us to find out whether a claim fits on the node.
func (n *node) trial(kind string, state held, fits bool) (float64, error) {
	allocator, err := n.allocator(state)
	if err != nil {
		return 0, err
	}
	var failed error
	took := shortest(20, func() {
		if result, err := n.allocate(allocator, kind); err != nil {
			failed = err
		} else if (result != nil) != fits {
			failed = fmt.Errorf("%s: unexpected answer to a claim of type %s: %v", n.name, kind, result)
		}
	})
	return float64(took.Nanoseconds()) / 1e3, failed
}

func (n *node) measure(onlySizes bool) error {
	if err := n.sizes(); err != nil || onlySizes {
		return err
	}
	_, full, err := n.fill("gpu")
	if err != nil {
		return err
	}
	for _, kind := range []string{"gpu", "share", "mig"} {
		if n.types[kind] == 0 {
			continue
		}
		results, _, err := n.fill(kind)
		if err != nil {
			return err
		}
		if len(results) == 0 {
			// A taint keeps claims from all of these devices.
			continue
		}
		n.clone(kind, results)
		fit, err := n.trial(kind, none(), true)
		if err != nil {
			return err
		}
		figure(n.name+"_fit_"+kind, fit, "us")
		refusal, err := n.trial(kind, full, false)
		if err != nil {
			return err
		}
		if n.types["mig"] == 0 {
			atMost(n.name+"_refusal_"+kind, refusal, refusalMax, "us")
		} else {
			figure(n.name+"_refusal_"+kind, refusal, "us")
		}
	}
	return nil
}

func main() {
	onlySizes := flag.Bool("sizes", false, "print only the sizes")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: cost [-sizes] FILE...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	for _, file := range flag.Args() {
		n, err := load(file)
		if err == nil {
			err = n.measure(*onlySizes)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}
	if missed {
		os.Exit(1)
	}
}
