//! Stable GPU numbers. The N of `gpu-N` is the NVML minor number when the GPU is first seen, and is
//! then kept by GPU UUID. A GPU that is missing after a reboot keeps its number. A new GPU never
//! takes a used number, although the GPU driver reuses the minor.

use divvy_api::GpuUuid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The N of `gpu-N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuNumber(pub u32);

impl fmt::Display for GpuNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

/// The assigned numbers. The driver stores them as a file in its state directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuNumbers {
    by_uuid: BTreeMap<GpuUuid, GpuNumber>,
}

impl GpuNumbers {
    /// The number of a GPU: the assigned one, else its minor if free, else the lowest free one.
    pub fn number(&mut self, uuid: &GpuUuid, minor: u32) -> GpuNumber {
        if let Some(number) = self.by_uuid.get(uuid) {
            return *number;
        }
        let taken = |n: u32| self.by_uuid.values().any(|have| have.0 == n);
        let number =
            GpuNumber(if taken(minor) { (0..).find(|n| !taken(*n)).unwrap_or(minor) } else { minor });
        self.by_uuid.insert(uuid.clone(), number);
        number
    }

    /// Releases the number of a GPU; only on request of an operator.
    pub fn forget(&mut self, uuid: &GpuUuid) -> Option<GpuNumber> {
        self.by_uuid.remove(uuid)
    }

    /// All assigned numbers, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuUuid, GpuNumber)> {
        self.by_uuid.iter().map(|(uuid, number)| (uuid, *number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn uuid(n: u32) -> GpuUuid {
        GpuUuid::from(format!("GPU-{n}"))
    }

    #[test]
    fn numbers_are_stable_when_minors_change() {
        let mut numbers = GpuNumbers::default();
        let first: Vec<_> = (0..4).map(|minor| numbers.number(&uuid(minor), minor).0).collect();
        assert_eq!(first, [0, 1, 2, 3]);
        // GPU 1 is missing after a reboot, so the GPU driver renumbers the others.
        let after: Vec<_> =
            [(0, 0), (2, 1), (3, 2)].map(|(gpu, minor)| numbers.number(&uuid(gpu), minor).0).into();
        assert_eq!(after, [0, 2, 3]);
        // A new GPU in its place has minor 3 and gets a new number.
        assert_eq!(numbers.number(&uuid(9), 3), GpuNumber(4));
        // The missing GPU returns.
        assert_eq!(numbers.number(&uuid(1), 1), GpuNumber(1));
    }

    #[test]
    fn released_number_is_reused() {
        let mut numbers = GpuNumbers::default();
        numbers.number(&uuid(0), 0);
        assert_eq!(numbers.forget(&uuid(0)), Some(GpuNumber(0)));
        assert_eq!(numbers.forget(&uuid(0)), None);
        assert_eq!(numbers.number(&uuid(1), 0), GpuNumber(0));
    }

    /// The file of one version must be readable by the next.
    #[test]
    fn file_format_is_unchanged() {
        let mut numbers = GpuNumbers::default();
        numbers.number(&uuid(7), 3);
        numbers.number(&uuid(5), 0);
        let golden = r#"{"by_uuid":{"GPU-5":0,"GPU-7":3}}"#;
        assert_eq!(serde_json::to_string(&numbers).expect("json"), golden);
        assert_eq!(serde_json::from_str::<GpuNumbers>(golden).expect("reads"), numbers);
        let newer = golden.replace("}}", r#"},"more":1}"#);
        assert_eq!(
            serde_json::from_str::<GpuNumbers>(&newer).expect("unknown fields are tolerated"),
            numbers
        );
    }

    proptest! {
        #[test]
        fn numbers_are_distinct_and_stable(seen in prop::collection::vec((0u32..12, 0u32..8), 0..40)) {
            let mut numbers = GpuNumbers::default();
            let mut given = BTreeMap::new();
            for (gpu, minor) in seen {
                let number = numbers.number(&uuid(gpu), minor);
                prop_assert_eq!(*given.entry(gpu).or_insert(number), number);
            }
            let distinct: std::collections::BTreeSet<_> = given.values().collect();
            prop_assert_eq!(distinct.len(), given.len());
            prop_assert_eq!(numbers.iter().count(), given.len());
        }
    }
}
