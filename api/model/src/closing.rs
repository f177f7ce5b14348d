//! When a mode that is turned off stops being published. Pure.
//!
//! The scheduler charges only published devices, so a device may be removed only if no claim is
//! allocated on it and none will be. A mode closes first: its devices stay, with a taint. The
//! controller approves the removal after [`REMOVAL_DELAY`] without an allocation. The approval names
//! the closing by its ID, and the taint of one closing is never interrupted, so an approval of an
//! earlier closing does not count. Opening is immediate. A device that a claim holds is published.

use crate::numbers::GpuNumber;
use divvy_api::sharing::Mode;
use divvy_api::{ClaimRef, DeviceName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Time without an allocation before a closing mode may be removed. The scheduler's views of slices
/// and of claims may each lag by a minute, and a pod may wait between allocation and the write of it;
/// this is ten times that lag. The controller counts from when it saw the taint itself.
pub const REMOVAL_DELAY: Duration = Duration::from_secs(600);

/// Annotation of the first ResourceSlice of a pool: the modes that are off, as [`ModeSet`]. The
/// controller reads it, because it does not read devices.
pub const MODES_OFF: &str = "gpu.divvy.dev/modes-off";
/// Annotation of a Node: the closings whose devices the daemon may remove, as [`ModeSet`].
pub const REMOVABLE: &str = "gpu.divvy.dev/removable";
/// Annotation of a Node: claims on devices that were removed, as JSON of [`Allocated`] values.
pub const ALLOCATED: &str = "gpu.divvy.dev/allocated";
/// Key of the taint of a closing mode.
pub const MODE_OFF_TAINT: &str = "gpu.divvy.dev/mode-off";

/// A mode of a GPU.
pub type GpuMode = (GpuNumber, Mode);

/// Identifies one closing: when the mode was turned off, in seconds since the Unix epoch. Later
/// closings on a node have greater IDs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClosingId(pub u64);

impl fmt::Display for ClosingId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}

/// The closings in progress.
pub type Closings = BTreeMap<GpuMode, ClosingId>;

/// Modes of GPUs, each with its closing or without one. In text, GPUs with the same value are grouped:
/// `timeslice@1764327342:0,1 mps:0`. Text that cannot be read is skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModeSet(pub BTreeMap<GpuMode, Option<ClosingId>>);

impl ModeSet {
    /// Reads the text of an annotation.
    pub fn parse(text: &str) -> Self {
        let mut set = BTreeMap::new();
        for group in text.split_ascii_whitespace() {
            let Some((name, gpus)) = group.split_once(':') else { continue };
            let (name, id) = match name.split_once('@') {
                None => (name, None),
                Some((name, id)) => match id.parse() {
                    Ok(id) => (name, Some(ClosingId(id))),
                    Err(_) => continue,
                },
            };
            let Some(mode) = Mode::ALL.into_iter().find(|mode| mode.as_str() == name) else { continue };
            let numbers = gpus.split(',').filter_map(|number| number.parse().ok());
            set.extend(numbers.map(|number| ((GpuNumber(number), mode), id)));
        }
        Self(set)
    }

    /// The modes with a closing.
    pub fn closings(&self) -> Closings {
        self.0.iter().filter_map(|(of, id)| Some((*of, (*id)?))).collect()
    }
}

impl fmt::Display for ModeSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: BTreeMap<(Mode, Option<ClosingId>), Vec<String>> = BTreeMap::new();
        for ((gpu, mode), id) in &self.0 {
            groups.entry((*mode, *id)).or_default().push(gpu.to_string());
        }
        for (index, ((mode, id), gpus)) in groups.into_iter().enumerate() {
            let space = if index == 0 { "" } else { " " };
            write!(out, "{space}{mode}")?;
            if let Some(id) = id {
                write!(out, "@{id}")?;
            }
            write!(out, ":{}", gpus.join(","))?;
        }
        Ok(())
    }
}

impl FromIterator<(GpuMode, Option<ClosingId>)> for ModeSet {
    fn from_iter<T: IntoIterator<Item = (GpuMode, Option<ClosingId>)>>(modes: T) -> Self {
        Self(modes.into_iter().collect())
    }
}

// The annotations go over the wire of the inventory as text.
impl Serialize for ModeSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ModeSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|text| Self::parse(&text))
    }
}

/// A claim on a device that was removed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Allocated {
    pub device: DeviceName,
    pub claim: ClaimRef,
}

/// The controller's decisions about the modes of a node, in annotations of its Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removals {
    #[serde(default)]
    pub removable: ModeSet,
    #[serde(default)]
    pub allocated: Vec<Allocated>,
}

impl Removals {
    /// Reads the two annotations. Text that cannot be read approves nothing and names no claim.
    pub fn parse(removable: Option<&str>, allocated: Option<&str>) -> Self {
        Self {
            removable: removable.map(ModeSet::parse).unwrap_or_default(),
            allocated: allocated.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default(),
        }
    }

    /// The values of the annotations [`REMOVABLE`] and [`ALLOCATED`]; `None` removes one.
    pub fn annotations(&self) -> [(&'static str, Option<String>); 2] {
        let removable = Some(self.removable.to_string()).filter(|text| !text.is_empty());
        let allocated = (!self.allocated.is_empty()).then(|| serde_json::to_string(&self.allocated).ok());
        [(REMOVABLE, removable), (ALLOCATED, allocated.flatten())]
    }

    /// Whether the controller says nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The daemon's decision about a mode of a GPU. It is stored before the devices are published,
/// because the slices may be gone after a restart: a starting kubelet deletes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ModeState {
    /// The mode is offered.
    Published,
    /// The mode is off; its devices are published with a taint.
    Closing(ClosingId),
    /// The mode is off; its devices were removed with the approval of this closing.
    Removed(ClosingId),
}

/// How the server shows the devices of a mode of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnServer {
    Nothing,
    /// All of them have the taint of this closing.
    Closing(ClosingId),
    /// Some have no such taint, or the taint of another closing.
    Other,
}

/// The facts that decide about a mode of a GPU.
#[derive(Clone, Copy, Debug)]
pub struct ModeFacts {
    /// The node configuration offers the mode.
    pub is_offered: bool,
    /// A claim holds one of the devices, by a record of this node.
    pub is_held: bool,
    /// The controller names a claim that is allocated on one of the devices.
    pub is_allocated: bool,
    /// The closing whose removal the controller approves.
    pub approved: Option<ClosingId>,
    pub on_server: OnServer,
}

/// The next state of a mode of a GPU. `None` is a mode that is off and was never published here.
///
/// `is_certain` is false for a state from before a restart. It counts only if the server still shows
/// the same closing, because another version of the daemon may have opened the mode in between.
/// `new` is greater than all earlier IDs of the node.
pub fn next_state(
    state: Option<ModeState>,
    is_certain: bool,
    facts: &ModeFacts,
    new: ClosingId,
) -> Option<ModeState> {
    if facts.is_offered {
        return Some(ModeState::Published);
    }
    let must_stay = facts.is_held || facts.is_allocated;
    match state {
        None if must_stay || facts.on_server != OnServer::Nothing => Some(ModeState::Closing(new)),
        None => None,
        Some(ModeState::Published) => Some(ModeState::Closing(new)),
        Some(ModeState::Closing(id)) => Some(match facts.on_server {
            shown if !is_certain && shown != OnServer::Closing(id) => ModeState::Closing(new),
            _ if !must_stay && facts.approved == Some(id) => ModeState::Removed(id),
            _ => ModeState::Closing(id),
        }),
        Some(ModeState::Removed(id)) => {
            let agrees =
                matches!(facts.on_server, OnServer::Nothing) || facts.on_server == OnServer::Closing(id);
            let stays_removed = !must_stay && (is_certain || agrees);
            Some(if stays_removed { ModeState::Removed(id) } else { ModeState::Closing(new) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ClosingId = ClosingId(1_764_327_342);
    const NEW: ClosingId = ClosingId(1_764_328_000);
    const QUIET: ModeFacts = ModeFacts {
        is_offered: false,
        is_held: false,
        is_allocated: false,
        approved: None,
        on_server: OnServer::Closing(A),
    };

    #[test]
    fn set_of_modes_round_trips_and_is_short() {
        let modes = (0..8).flat_map(|gpu| Mode::ALL.map(|mode| (GpuNumber(gpu), mode)));
        let one_change: ModeSet = modes.clone().map(|of| (of, Some(A))).collect();
        assert_eq!(ModeSet::parse(&one_change.to_string()), one_change);
        assert!(one_change.to_string().len() < 250, "{one_change}");
        let all_different: ModeSet = modes.zip(0..).map(|(of, n)| (of, Some(ClosingId(A.0 + n)))).collect();
        assert_eq!(ModeSet::parse(&all_different.to_string()), all_different);
        assert!(all_different.to_string().len() < 900, "{all_different}");
    }

    #[test]
    fn unreadable_modes_are_skipped() {
        let set = ModeSet::parse("mps:0,x,2 new:1 timeslice@x:1 share@7:3 whole");
        assert_eq!(set.to_string(), "share@7:3 mps:0,2");
    }

    #[test]
    fn annotations_round_trip() {
        let claim = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "u".into() };
        let allocated = vec![Allocated { device: "gpu-0-mps".into(), claim }];
        let removals = Removals { removable: ModeSet::parse("mps@7:0"), allocated };
        let [(_, removable), (_, allocated)] = removals.annotations();
        assert_eq!(Removals::parse(removable.as_deref(), allocated.as_deref()), removals);
        assert_eq!(Removals::default().annotations(), [(REMOVABLE, None), (ALLOCATED, None)]);
        assert!(Removals::parse(Some("?"), Some("{")).is_empty());
    }

    #[track_caller]
    fn check(state: Option<ModeState>, facts: ModeFacts, expected: Option<ModeState>) {
        assert_eq!(next_state(state, true, &facts, NEW), expected, "{state:?} {facts:?}");
    }

    #[test]
    fn mode_closes_and_is_removed_after_approval() {
        let (published, closing) = (Some(ModeState::Published), Some(ModeState::Closing(A)));
        let removed = Some(ModeState::Removed(A));
        check(published, QUIET, Some(ModeState::Closing(NEW)));
        check(closing, QUIET, closing);
        let approved = ModeFacts { approved: Some(A), ..QUIET };
        check(closing, approved, removed);
        check(closing, ModeFacts { approved: Some(ClosingId(A.0 - 1)), ..QUIET }, closing);
        check(closing, ModeFacts { is_held: true, ..approved }, closing);
        check(closing, ModeFacts { is_allocated: true, ..approved }, closing);
        for on_server in [OnServer::Nothing, OnServer::Closing(A), OnServer::Other] {
            check(removed, ModeFacts { on_server, ..QUIET }, removed);
        }
        check(removed, ModeFacts { is_held: true, ..approved }, Some(ModeState::Closing(NEW)));
        check(removed, ModeFacts { is_allocated: true, ..approved }, Some(ModeState::Closing(NEW)));
        for state in [None, published, closing, removed] {
            check(state, ModeFacts { is_offered: true, ..approved }, published);
        }
    }

    #[test]
    fn mode_that_was_never_published_is_absent() {
        let fresh = ModeFacts { on_server: OnServer::Nothing, ..QUIET };
        check(None, fresh, None);
        check(None, ModeFacts { on_server: OnServer::Other, ..QUIET }, Some(ModeState::Closing(NEW)));
        check(None, ModeFacts { is_held: true, ..fresh }, Some(ModeState::Closing(NEW)));
    }

    #[test]
    fn stored_closing_counts_only_if_the_server_shows_it() {
        let after_restart = |state, on_server| {
            next_state(Some(state), false, &ModeFacts { on_server, approved: Some(A), ..QUIET }, NEW)
        };
        let (closing, removed) = (ModeState::Closing(A), ModeState::Removed(A));
        assert_eq!(after_restart(closing, OnServer::Closing(A)), Some(removed));
        assert_eq!(after_restart(removed, OnServer::Closing(A)), Some(removed));
        assert_eq!(after_restart(removed, OnServer::Nothing), Some(removed));
        for on_server in [OnServer::Nothing, OnServer::Other, OnServer::Closing(ClosingId(7))] {
            assert_eq!(after_restart(closing, on_server), Some(ModeState::Closing(NEW)));
        }
        for on_server in [OnServer::Other, OnServer::Closing(ClosingId(7))] {
            assert_eq!(after_restart(removed, on_server), Some(ModeState::Closing(NEW)));
        }
    }
}
