//! Whose an instance is, although readings are older than the records.
//!
//! A reading may show an instance of ours that was destroyed, and its record
//! removed, since. So one that no record explains any more is doubted first and
//! stays ours for as long. It is somebody else's when a reading that began
//! without a record of it shows it: a record is there before its instance, and
//! what is asked of a GPU later than a reading happens after it.

use super::Ours;
use divvy_api::GpuUuid;
use divvy_model::inventory::Origin;
use divvy_nvml::RawInstance;
use std::collections::BTreeMap;

/// An instance: GPU, id, profile id, start.
type Seen = (GpuUuid, u32, u32, u32);

/// Instances that are ours as far as anyone knows, yet no record explains them.
#[derive(Debug, Default)]
pub struct Doubts(BTreeMap<Seen, Since>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Since {
    /// A reading that may be older than the doubt.
    Reading,
    /// The last reading of the GPU began; no record explained it then.
    Begun,
}

/// What was read since the last judgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh<'a> {
    /// All GPUs, while nobody could change them.
    All,
    Gpu(&'a GpuUuid),
    Nothing,
}

impl Doubts {
    /// A reading of the GPU begins.
    pub fn reading_begins(&mut self, gpu: &GpuUuid, ours: &Ours) {
        self.0.retain(|(of, _, profile_id, start), _| of != gpu || !ours(of, *profile_id, *start));
        for (_, since) in self.0.iter_mut().filter(|((of, ..), _)| of == gpu) {
            *since = Since::Begun;
        }
    }

    /// The GPUs that have to be read for it.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.0.keys().map(|(gpu, ..)| gpu)
    }

    /// Judges instances one by one; what is not judged is not doubted any more.
    pub fn judge<'a>(&'a mut self, ours: &'a Ours, fresh: Fresh<'a>) -> Judge<'a> {
        let before = std::mem::take(&mut self.0);
        Judge { ours, fresh, before, now: self }
    }
}

/// Judges the instances of one inventory.
pub struct Judge<'a> {
    ours: &'a Ours,
    fresh: Fresh<'a>,
    before: BTreeMap<Seen, Since>,
    now: &'a mut Doubts,
}

impl Judge<'_> {
    /// Whose the instance is; `last` is what was said of it before.
    pub(super) fn origin(&mut self, gpu: &GpuUuid, raw: &RawInstance, last: Option<Origin>) -> Origin {
        if (self.ours)(gpu, raw.profile_id, raw.placement.start) {
            return Origin::Ours;
        }
        let seen = (gpu.clone(), raw.id, raw.profile_id, raw.placement.start);
        let since = self.before.get(&seen).copied().unwrap_or(Since::Reading);
        let proven = match self.fresh {
            Fresh::All => true,
            Fresh::Gpu(fresh) => fresh == gpu && since == Since::Begun,
            Fresh::Nothing => false,
        };
        if proven || last == Some(Origin::Foreign) {
            return Origin::Foreign;
        }
        self.now.0.insert(seen, since);
        Origin::Ours
    }
}
