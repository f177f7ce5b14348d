package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// card is a listing of a real card.
type card struct {
	Model    string            `json:"model"`
	Product  string            `json:"product"`
	TotalMiB uint64            `json:"total_mib"`
	Toggle   string            `json:"toggle"`
	Profiles []profile         `json:"profiles"`
	GiIDs    map[string]uint32 `json:"gi_ids"`
	Orders   []order           `json:"orders"`
}

type profile struct {
	Name      string   `json:"name"`
	Index     int      `json:"index"`
	ID        uint32   `json:"id"`
	Instances uint32   `json:"instances"`
	MemoryMiB uint64   `json:"memory_mib"`
	SM        uint32   `json:"sm"`
	CE        uint32   `json:"ce"`
	Dec       uint32   `json:"dec"`
	Enc       uint32   `json:"enc"`
	Jpg       uint32   `json:"jpg"`
	Ofa       uint32   `json:"ofa"`
	Size      uint32   `json:"size"`
	Starts    []uint32 `json:"starts"`
}

// order lists the ids of instances that are created one after the other at the driver's placements; null if it refuses.
type order struct {
	Profiles []uint32  `json:"profiles"`
	IDs      []*uint32 `json:"ids"`
}

func readListings(dir string) ([]card, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		return nil, fmt.Errorf("no listings in %s", dir)
	}
	cards := make([]card, 0, len(files))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var read card
		if err := json.Unmarshal(text, &read); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		cards = append(cards, read)
	}
	return cards, nil
}

func (p *peer) checkCard(card card) {
	device, err := p.device(card.Product)
	if err != nil {
		p.check(card.Model, func() error { return err })
		return
	}
	name := func(what string) string { return card.Model + " " + what }
	if card.TotalMiB != 0 {
		p.check(name("memory"), func() error {
			memory, ret := device.GetMemoryInfo()
			return first(code(ret), want("total memory", memory.Total>>20, card.TotalMiB))
		})
	}
	for _, profile := range card.Profiles {
		p.check(name("profile "+profile.Name), func() error { return checkProfile(device, profile) })
	}
	p.check(name("has no other profile"), func() error { return checkIndices(device, card) })
	p.check(name("MIG on"), func() error { return setMode(device, nvml.DEVICE_MIG_ENABLE) })
	for _, profile := range card.Profiles {
		for _, start := range profile.Starts {
			what := fmt.Sprintf("%s at %d:%d", profile.Name, start, profile.Size)
			p.check(name(what), func() error { return p.lifeCycle(device, card, profile, start) })
		}
	}
	for _, order := range card.Orders {
		p.check(name(fmt.Sprintf("created %v", order.Profiles)), func() error { return createInOrder(device, card, order) })
	}
	p.check(name("MIG off"), func() error { return setMode(device, nvml.DEVICE_MIG_DISABLE) })
}

func checkProfile(device nvml.Device, listed profile) error {
	info, ret := device.GetGpuInstanceProfileInfo(listed.Index)
	if ret != nvml.SUCCESS {
		return ret
	}
	named, ret := device.GetGpuInstanceProfileInfoV(listed.Index).V3()
	if ret != nvml.SUCCESS {
		return ret
	}
	places, ret := device.GetGpuInstancePossiblePlacements(&info)
	if ret != nvml.SUCCESS {
		return ret
	}
	starts := []uint32{}
	for _, place := range places {
		starts = append(starts, place.Start)
		if err := want("size", place.Size, listed.Size); err != nil {
			return err
		}
	}
	engines := []uint32{
		info.MultiprocessorCount, info.CopyEngineCount, info.DecoderCount, info.EncoderCount, info.JpegCount, info.OfaCount,
	}
	return first(
		want("id", info.Id, listed.ID),
		want("instances", info.InstanceCount, listed.Instances),
		want("memory", info.MemorySizeMB, listed.MemoryMiB),
		want("SM, CE, DEC, ENC, JPEG, OFA", engines,
			[]uint32{listed.SM, listed.CE, listed.Dec, listed.Enc, listed.Jpg, listed.Ofa}),
		want("starts", starts, listed.Starts),
		want("id of version 3", named.Id, listed.ID),
		want("memory of version 3", named.MemorySizeMB, listed.MemoryMiB),
		want("name", text(named.Name[:]), "MIG "+listed.Name),
	)
}

// checkIndices compares the enumeration of profiles with the listing: unlisted profiles must be unsupported.
func checkIndices(device nvml.Device, card card) error {
	listed := map[int]bool{}
	for _, profile := range card.Profiles {
		listed[profile.Index] = true
	}
	for index := range nvml.GPU_INSTANCE_PROFILE_COUNT {
		_, ret := device.GetGpuInstanceProfileInfo(index)
		expected := nvml.ERROR_NOT_SUPPORTED
		if listed[index] {
			expected = nvml.SUCCESS
		}
		if ret != expected {
			return fmt.Errorf("profile index %d: %v", index, ret)
		}
	}
	_, ret := device.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_COUNT)
	return want("the end", ret, nvml.ERROR_INVALID_ARGUMENT)
}

func setMode(device nvml.Device, mode int) error {
	activation, ret := device.SetMigMode(mode)
	if err := first(code(ret), code(activation)); err != nil {
		return err
	}
	current, pending, ret := device.GetMigMode()
	return first(code(ret), want("current and pending mode", [2]int{current, pending}, [2]int{mode, mode}))
}

// lifeCycle creates an instance at a placement, reads it by all calls, and destroys it.
func (p *peer) lifeCycle(device nvml.Device, card card, listed profile, start uint32) error {
	info, ret := device.GetGpuInstanceProfileInfo(listed.Index)
	if ret != nvml.SUCCESS {
		return ret
	}
	place := nvml.GpuInstancePlacement{Start: start, Size: listed.Size}
	gi, ret := device.CreateGpuInstanceWithPlacement(&info, &place)
	if ret != nvml.SUCCESS {
		return ret
	}
	giInfo, ret := gi.GetInfo()
	if err := first(
		code(ret),
		want("GPU instance", giInfo.Id, card.GiIDs[fmt.Sprintf("%d:%d", start, listed.Size)]),
		want("placement", giInfo.Placement, place),
	); err != nil {
		return err
	}
	if _, ret := device.CreateGpuInstanceWithPlacement(&info, &place); ret != nvml.ERROR_INSUFFICIENT_RESOURCES {
		return fmt.Errorf("a second one at the same place: %v", ret)
	}
	ci, err := wholeComputeInstance(gi, info.SliceCount)
	if err != nil {
		return err
	}
	ciInfo, ret := ci.GetInfo()
	if ret != nvml.SUCCESS {
		return ret
	}
	uuid, ret := ciInfo.Device.GetUUID()
	if ret != nvml.SUCCESS {
		return ret
	}
	mig, ret := p.nvml.DeviceGetHandleByUUID(uuid)
	if ret != nvml.SUCCESS {
		return fmt.Errorf("%s: %w", uuid, ret)
	}
	attributes, ret := mig.GetAttributes()
	if err := first(
		code(ret),
		want("memory of the MIG device", attributes.MemorySizeMB, listed.MemoryMiB),
		want("SMs of the MIG device", attributes.MultiprocessorCount, listed.SM),
	); err != nil {
		return err
	}
	if ret := gi.Destroy(); ret != nvml.ERROR_IN_USE {
		return fmt.Errorf("destroying it with a compute instance: %v", ret)
	}
	return first(code(ci.Destroy()), code(gi.Destroy()))
}

// wholeComputeInstance creates a compute instance of all slices.
func wholeComputeInstance(gi nvml.GpuInstance, slices uint32) (nvml.ComputeInstance, error) {
	for index := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := gi.GetComputeInstanceProfileInfo(index, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret != nvml.SUCCESS || info.SliceCount != slices {
			continue
		}
		ci, ret := gi.CreateComputeInstance(&info)
		return ci, code(ret)
	}
	return nil, fmt.Errorf("no compute instance profile of %d slices", slices)
}

// createInOrder lets the driver place instances, and compares their ids with those of a real card.
func createInOrder(device nvml.Device, card card, order order) (err error) {
	var made []nvml.GpuInstance
	defer func() {
		for _, gi := range made {
			err = first(err, code(gi.Destroy()))
		}
	}()
	for at, id := range order.Profiles {
		info := nvml.GpuInstanceProfileInfo{Id: id}
		gi, ret := device.CreateGpuInstance(&info)
		if order.IDs[at] == nil {
			if ret != nvml.ERROR_INSUFFICIENT_RESOURCES {
				return fmt.Errorf("number %d of profile %d: %v", at, id, ret)
			}
			continue
		}
		if ret != nvml.SUCCESS {
			return fmt.Errorf("number %d of profile %d: %w", at, id, ret)
		}
		made = append(made, gi)
		got, ret := gi.GetInfo()
		if err := first(code(ret), want(fmt.Sprintf("number %d", at), got.Id, *order.IDs[at])); err != nil {
			return err
		}
	}
	return nil
}

func text(chars []int8) string {
	bytes := []byte{}
	for _, char := range chars {
		if char == 0 {
			break
		}
		bytes = append(bytes, byte(char))
	}
	return string(bytes)
}
