// Records the cases of the scheduler's own table of allocator tests: the input of each case, and the answer of the release's
// allocator with the features in FEATURES. Writes them to OUT.
//
// Upstream's runner calls the constructor below for each case, and still checks the answer with the features of the case.
package divvy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/api"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/dynamic-resource-allocation/structured/internal"
	"k8s.io/dynamic-resource-allocation/structured/internal/allocatortesting"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// A case of the table. Devices are `driver/pool/device`.
type recorded struct {
	Node    v1.Node                      `json:"node"`
	Classes []*resourceapi.DeviceClass   `json:"classes"`
	Slices  []resourceapi.ResourceSlice  `json:"slices"`
	Claims  []*resourceapi.ResourceClaim `json:"claims"`
	// Devices that other claims hold: exclusively, and with shares.
	Exclusive []string `json:"exclusive,omitempty"`
	Shared    []string `json:"shared,omitempty"`
	// The amounts that shares of a device consume, by capacity name.
	Consumed map[string]map[string]string `json:"consumed,omitempty"`

	// "none", "error", or the devices of each claim as `request=device name:amount`.
	Answer any `json:"answer"`
}

// Answers with the features of the case, and records the answer with those of the release.
type recorder struct {
	internal.Allocator
	release internal.Allocator
	state   structured.AllocatedState
	classes structured.DeviceClassLister
	slices  []resourceapi.ResourceSlice
	table   map[string]recorded
}

func (r recorder) Allocate(ctx context.Context, node *v1.Node, claims []*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	classes, err := r.classes.List()
	if err != nil {
		return nil, err
	}
	c := recorded{Node: v1.Node{ObjectMeta: node.ObjectMeta}, Classes: classes, Slices: r.slices, Claims: claims}
	for device := range r.state.AllocatedDevices {
		c.Exclusive = append(c.Exclusive, device.String())
	}
	for share := range r.state.AllocatedSharedDeviceIDs {
		device := fmt.Sprint(share)
		if id, ok := any(share).(interface{ GetDeviceID() structured.DeviceID }); ok {
			device = id.GetDeviceID().String()
		}
		c.Shared = append(c.Shared, device)
	}
	slices.Sort(c.Exclusive)
	slices.Sort(c.Shared)
	for device, amounts := range r.state.AggregatedCapacity {
		consumed := map[string]string{}
		for name, amount := range amounts {
			consumed[fmt.Sprint(name)] = amount.String()
		}
		if c.Consumed == nil {
			c.Consumed = map[string]map[string]string{}
		}
		c.Consumed[device.String()] = consumed
	}
	c.Answer = answer(ctx, r.release, node, claims)
	// The cases of "interrupt" cancel the context, which has no equivalent here.
	if name := caseName(ctx); !strings.HasPrefix(name, "interrupt/") {
		r.table[name] = c
	}
	return r.Allocator.Allocate(ctx, node, claims)
}

// The runner skips cases with an expected number of steps if the allocator has no statistics.
func (r recorder) GetStats() internal.Stats {
	return r.Allocator.(internal.AllocatorExtended).GetStats()
}

// A panic counts as an error, so that one case does not end the table.
func answer(ctx context.Context, allocator internal.Allocator, node *v1.Node, claims []*resourceapi.ResourceClaim) (answer any) {
	defer func() {
		if cause := recover(); cause != nil {
			fmt.Printf("panic in %s: %v\n", caseName(ctx), cause)
			answer = "error"
		}
	}()
	results, err := allocator.Allocate(ctx, node, claims)
	if err != nil {
		return "error"
	}
	if len(results) == 0 {
		return "none"
	}
	told := make([][]string, len(results))
	for i, result := range results {
		told[i] = []string{}
		for _, device := range result.Devices.Results {
			text := fmt.Sprintf("%s=%s/%s/%s", device.Request, device.Driver, device.Pool, device.Device)
			for _, name := range slices.Sorted(maps.Keys(device.ConsumedCapacity)) {
				amount := device.ConsumedCapacity[name]
				text += fmt.Sprintf(" %s:%s", name, decimal(amount.AsDec().String()))
			}
			told[i] = append(told[i], text)
		}
	}
	return told
}

// The number without zeros at the end of its fraction.
func decimal(number string) string {
	if strings.Contains(number, ".") {
		number = strings.TrimRight(strings.TrimRight(number, "0"), ".")
	}
	return number
}

// The name of the case, from the test that the context belongs to.
func caseName(ctx context.Context) string {
	test, ok := ctx.(interface{ Name() string })
	if !ok {
		test = klog.FromContext(ctx).GetSink().(ktesting.Underlier).GetUnderlying().(interface{ Name() string })
	}
	_, name, _ := strings.Cut(test.Name(), "/")
	return name
}

// The slices as the API server sends them. Since 1.38, the allocator takes another type.
func onTheWire[Slice any](published []Slice) ([]resourceapi.ResourceSlice, error) {
	wire := make([]resourceapi.ResourceSlice, len(published))
	for i := range published {
		switch slice := any(published[i]).(type) {
		case *resourceapi.ResourceSlice:
			wire[i] = *slice
		case *api.ResourceSlice:
			if err := api.Convert_api_ResourceSlice_To_v1_ResourceSlice(slice, &wire[i], nil); err != nil {
				return nil, err
			}
		default:
			return nil, fmt.Errorf("unknown type %T", slice)
		}
	}
	return wire, nil
}

type constructor[Slice any, Allocator any] func(context.Context, structured.Features, structured.AllocatedState,
	structured.DeviceClassLister, []Slice, *cel.Cache) (Allocator, error)

func recording[Slice any](features structured.Features, create constructor[Slice, structured.Allocator], table map[string]recorded) constructor[Slice, internal.Allocator] {
	return func(ctx context.Context, ofCase structured.Features, state structured.AllocatedState,
		classes structured.DeviceClassLister, published []Slice, cache *cel.Cache) (internal.Allocator, error) {
		// The stable implementation of some releases fails cases that it never claimed to pass.
		structured.EnableAllocators("experimental")
		allocator, err := create(ctx, ofCase, state, classes, published, cache)
		structured.EnableAllocators()
		if err != nil {
			return nil, err
		}
		release, err := create(ctx, features, state, classes, published, cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
		if err != nil {
			return nil, err
		}
		wire, err := onTheWire(published)
		if err != nil {
			return nil, err
		}
		return recorder{
			Allocator: allocator.(internal.Allocator), release: release.(internal.Allocator),
			state: state, classes: classes, slices: wire, table: table,
		}, nil
	}
}

func TestTable(t *testing.T) {
	out := os.Getenv("OUT")
	if out == "" {
		t.Skip("OUT is not set")
	}
	var features, all structured.Features
	for _, name := range strings.Split(os.Getenv("FEATURES"), ",") {
		reflect.ValueOf(&features).Elem().FieldByName(name).SetBool(true)
	}
	for field := range reflect.TypeOf(all).NumField() {
		reflect.ValueOf(&all).Elem().Field(field).SetBool(true)
	}
	table := map[string]recorded{}
	allocatortesting.TestAllocator(t, all, recording(features, structured.NewAllocator, table))
	allocatortesting.TestLexicographicalAllocator(t, all, recording(features, structured.NewAllocator, table))
	text, err := json.Marshal(table)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(out, text, 0o644); err != nil {
		t.Fatal(err)
	}
}
