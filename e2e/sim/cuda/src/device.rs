//! Entry points for the GPUs that this process sees, by ordinal, and their properties in CUDA.

use crate::argument::{Out, Text, write_text};
use crate::code::Code;
use crate::frame::entry;
use crate::objects::Device;

/// `CUuuid`.
pub(crate) type Uuid = [u8; 16];

impl Device {
    /// A `CUdevice_attribute`, of those that programs query. Others are 0, as for missing features.
    fn attribute(&self, attribute: i32) -> i32 {
        let (major, minor) = self.model.compute_capability;
        match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 49152,
            9 => 65536,
            10 => 32,
            11 => i32::MAX,
            12 | 82 => 65536,
            13 => 1_980_000,
            14 => 512,
            16 => self.multiprocessors.cast_signed(),
            19 | 31 | 41 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 => 1,
            33 => self.pci().1,
            34 => self.pci().2,
            50 => self.pci().0,
            36 => 2_619_000,
            37 => 5120,
            38 => 50 << 20,
            39 => {
                if major == 7 {
                    1024
                } else if (major, minor) == (8, 0) || major >= 9 {
                    2048
                } else {
                    1536
                }
            }
            40 => 3,
            75 => major.cast_signed(),
            76 => minor.cast_signed(),
            81 | 97 => 227 << 10,
            // Virtual memory, exports as file descriptors, pools and their exports.
            102 | 103 | 115 | 119 | 124 | 125 => 1,
            106 => 32,
            _ => 0,
        }
    }

    /// PCI domain, bus and device.
    fn pci(&self) -> (i32, i32, i32) {
        let mut parts = self.bdf.split([':', '.']).map(|part| i32::from_str_radix(part, 16).unwrap_or(0));
        let mut next = || parts.next().unwrap_or(0);
        (next(), next(), next())
    }
}

/// The bytes of `GPU-xxxxxxxx-...`.
fn uuid_bytes(text: &str) -> Uuid {
    let digits: Vec<u8> = text
        .split_once('-')
        .map_or("", |(_, digits)| digits)
        .chars()
        .filter_map(|digit| u8::try_from(digit.to_digit(16)?).ok())
        .collect();
    let mut bytes = [0; 16];
    bytes
        .iter_mut()
        .zip(digits.chunks(2))
        .for_each(|(byte, pair)| *byte = pair.iter().fold(0, |sum, half| sum << 4 | half));
    bytes
}

/// `CUdevprop`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    threads_per_block: i32,
    threads: [i32; 3],
    grid: [i32; 3],
    shared_memory: i32,
    constant_memory: i32,
    warp: i32,
    pitch: i32,
    registers: i32,
    clock: i32,
    alignment: i32,
}

entry! {
    fn cuDeviceGet(process; device: Out<i32>, ordinal: i32) {
        device.check()?;
        process.device(ordinal)?;
        device.set(ordinal)
    }

    fn cuDeviceGetCount(process; count: Out<i32>) {
        count.set(process.devices.len() as i32)
    }

    fn cuDeviceGetName(process; name: Out<u8>, length: i32, device: i32) {
        write_text(name, length, &process.device(device)?.name)
    }

    /// The UUID of the GPU, for a MIG device too.
    fn cuDeviceGetUuid(process; uuid: Out<Uuid>, device: i32) {
        uuid.set(uuid_bytes(&process.device(device)?.gpu_uuid))
    }

    fn cuDeviceGetUuid_v2(process; uuid: Out<Uuid>, device: i32) {
        uuid.set(uuid_bytes(&process.device(device)?.uuid))
    }

    fn cuDeviceTotalMem(process; bytes: Out<u32>, device: i32) {
        bytes.set(u32::try_from(process.device(device)?.memory).unwrap_or(u32::MAX))
    }

    fn cuDeviceTotalMem_v2(process; bytes: Out<u64>, device: i32) {
        bytes.set(process.device(device)?.memory)
    }

    fn cuDeviceGetAttribute(process; value: Out<i32>, attribute: i32, device: i32) {
        if !(1..=200).contains(&attribute) {
            return Err(Code::InvalidValue);
        }
        value.set(process.device(device)?.attribute(attribute))
    }

    fn cuDeviceGetProperties(process; properties: Out<Properties>, device: i32) {
        let device = process.device(device)?;
        let of = |attribute| device.attribute(attribute);
        properties.set(Properties {
            threads_per_block: of(1),
            threads: [of(2), of(3), of(4)],
            grid: [of(5), of(6), of(7)],
            shared_memory: of(8),
            constant_memory: of(9),
            warp: of(10),
            pitch: of(11),
            registers: of(12),
            clock: of(13),
            alignment: of(14),
        })
    }

    fn cuDeviceComputeCapability(process; major: Out<i32>, minor: Out<i32>, device: i32) {
        let device = process.device(device)?;
        minor.check()?;
        major.set(device.attribute(75))?;
        minor.set(device.attribute(76))
    }

    fn cuDeviceGetPCIBusId(process; text: Out<u8>, length: i32, device: i32) {
        write_text(text, length, &process.device(device)?.bdf.to_uppercase())
    }

    fn cuDeviceGetByPCIBusId(process; device: Out<i32>, text: Text) {
        let wanted = text.get()?.to_lowercase();
        device.check()?;
        // With or without the domain's leading zeros, or without a domain.
        let is = |known: &&Device| known.bdf.ends_with(wanted.trim_start_matches('0')) && !wanted.is_empty();
        device.set(process.devices.iter().find(is).ok_or(Code::InvalidDevice)?.ordinal)
    }

    fn cuDeviceCanAccessPeer(process; can: Out<i32>, device: i32, peer: i32) {
        let (one, other) = (process.device(device)?, process.device(peer)?);
        can.set(i32::from(device != peer && one.place.instance.is_none() && other.place.instance.is_none()))
    }

    fn cuDeviceGetExecAffinitySupport(process; supported: Out<i32>, _kind: i32, device: i32) {
        process.device(device)?;
        supported.set(0)
    }

    fn cuDeviceGetP2PAttribute(process; value: Out<i32>, attribute: i32, device: i32, peer: i32) {
        let (one, other) = (process.device(device)?, process.device(peer)?);
        let reach = device != peer && one.place.instance.is_none() && other.place.instance.is_none();
        value.set(i32::from(reach && attribute != 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_text_parses_to_bytes() {
        let bytes = uuid_bytes("GPU-00010203-0405-0607-0809-0a0b0c0d0eff");
        assert_eq!(bytes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
    }
}
