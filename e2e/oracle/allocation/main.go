// Allocates claims as the scheduler does, with the structured allocator of k8s.io/dynamic-resource-allocation and the
// features of a default cluster.
//
// Standard input is a list of test cases, each with the slices of a node and sequences of claims to allocate and release.
// Standard output has the answer to each step. An accepted claim stays allocated until it is released, as in
// pkg/scheduler/framework/plugins/dynamicresources/allocateddevices.go.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

type world struct {
	Node      v1.Node                     `json:"node"`
	Slices    []resourceapi.ResourceSlice `json:"slices"`
	Classes   []resourceapi.DeviceClass   `json:"classes"`
	Sequences [][]step                    `json:"sequences"`
}

// Exactly one field is set. Held is a claim that was allocated earlier, independent of the published slices.
type step struct {
	Take    *resourceapi.ResourceClaim `json:"take"`
	Held    *resourceapi.ResourceClaim `json:"held"`
	Release string                     `json:"release"`
}

type classes []resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) {
	all := make([]*resourceapi.DeviceClass, len(c))
	for i := range c {
		all[i] = &c[i]
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for i := range c {
		if c[i].Name == name {
			return &c[i], nil
		}
	}
	return nil, fmt.Errorf("no class %s", name)
}

func taken(allocations map[string]resourceapi.AllocationResult) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, allocation := range allocations {
		for _, result := range allocation.Devices.Results {
			if result.AdminAccess != nil && *result.AdminAccess {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		}
	}
	return state
}

// Formats a result as request=device, with the non-zero capacities that a share consumes, as plain numbers, because a
// quantity has several representations.
func told(allocation resourceapi.AllocationResult) string {
	var devices []string
	for _, result := range allocation.Devices.Results {
		device := result.Request + "=" + result.Device
		for _, name := range slices.Sorted(maps.Keys(result.ConsumedCapacity)) {
			if amount := result.ConsumedCapacity[name]; !amount.IsZero() {
				device += fmt.Sprintf(" %s:%d", name, amount.Value())
			}
		}
		devices = append(devices, device)
	}
	return strings.Join(devices, ", ")
}

func answers(w world, steps []step, cache *cel.Cache) ([]string, error) {
	features := structured.Features{
		AdminAccess:            true,
		ConsumableCapacity:     true,
		DeviceBindingAndStatus: true,
		DeviceTaints:           true,
		PartitionableDevices:   true,
		PrioritizedList:        true,
	}
	var published []*resourceapi.ResourceSlice
	for i := range w.Slices {
		published = append(published, &w.Slices[i])
	}
	allocations := map[string]resourceapi.AllocationResult{}
	var out []string
	for _, step := range steps {
		if step.Held != nil {
			allocations[step.Held.Name] = *step.Held.Status.Allocation
			out = append(out, "")
			continue
		}
		if step.Take == nil {
			delete(allocations, step.Release)
			out = append(out, "")
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		allocator, err := structured.NewAllocator(ctx, features, taken(allocations), classes(w.Classes), published, cache)
		if err != nil {
			cancel()
			return nil, err
		}
		found, err := allocator.Allocate(ctx, &w.Node, []*resourceapi.ResourceClaim{step.Take})
		expired := ctx.Err()
		cancel()
		switch {
		case expired != nil:
			return nil, expired
		case err != nil:
			out = append(out, "error")
		case len(found) == 0:
			out = append(out, "refused")
		default:
			allocations[step.Take.Name] = found[0]
			out = append(out, told(found[0]))
		}
	}
	return out, nil
}

func main() {
	var worlds []world
	if err := json.NewDecoder(os.Stdin).Decode(&worlds); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	cache := cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})
	told := [][][]string{}
	for _, world := range worlds {
		sequences := [][]string{}
		for _, steps := range world.Sequences {
			answers, err := answers(world, steps, cache)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			sequences = append(sequences, answers)
		}
		told = append(told, sequences)
	}
	if err := json.NewEncoder(os.Stdout).Encode(told); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
