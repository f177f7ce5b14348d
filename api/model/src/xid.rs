//! XID errors of the GPU driver: NVIDIA's meaning of each number, and what it says about a GPU.
//!
//! Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog", Ampere and newer, read in 2026:
//! <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>. The class follows the
//! column "Immediate Action". One rule precedes it: a number that a program can provoke is of class
//! [`XidClass::Application`]. So no tenant can take a GPU out of service.

use crate::health::HealthState;

/// Classes of XIDs by their consequence for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum XidClass {
    /// A program can cause it. It never changes a state.
    Application,
    /// It needs no action, or NVIDIA documents none. It never changes a state.
    Info,
    /// The GPU works, with less redundancy or speed.
    Degraded,
    /// Only a reset of the GPU ends the fault.
    NeedsReset,
    /// Only a reboot of the node or a replacement ends the fault.
    Lost,
}

impl XidClass {
    /// All classes.
    pub const ALL: [Self; 5] = [Self::Application, Self::Info, Self::Degraded, Self::NeedsReset, Self::Lost];

    /// The name in metrics and documents.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::Info => "info",
            Self::Degraded => "degraded",
            Self::NeedsReset => "needs-reset",
            Self::Lost => "lost",
        }
    }

    /// The state of the GPU after it; `None` if it changes no state.
    pub const fn state(self) -> Option<HealthState> {
        match self {
            Self::Application | Self::Info => None,
            Self::Degraded => Some(HealthState::Degraded),
            Self::NeedsReset => Some(HealthState::NeedsReset),
            Self::Lost => Some(HealthState::Lost),
        }
    }
}

/// An XID that NVIDIA documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xid {
    pub number: u64,
    /// NVIDIA's description.
    pub meaning: &'static str,
    pub class: XidClass,
}

/// `NVML` event data for an XID that the GPU driver does not name.
pub const UNKNOWN_XID: u64 = 999;

/// The number of the XID that reports a change of the GPU's recovery action.
pub const RECOVERY_ACTION_CHANGED: u64 = 154;

/// The documented XID with that number.
pub fn find(number: u64) -> Option<&'static Xid> {
    XIDS.binary_search_by_key(&number, |xid| xid.number).ok().map(|at| &XIDS[at])
}

/// The name of the class in metrics; an undocumented number is `unknown`.
pub fn class_name(number: u64) -> &'static str {
    find(number).map_or("unknown", |xid| xid.class.as_str())
}

const fn application(number: u64, meaning: &'static str) -> Xid {
    Xid { number, meaning, class: XidClass::Application }
}

const fn info(number: u64, meaning: &'static str) -> Xid {
    Xid { number, meaning, class: XidClass::Info }
}

const fn degraded(number: u64, meaning: &'static str) -> Xid {
    Xid { number, meaning, class: XidClass::Degraded }
}

const fn needs_reset(number: u64, meaning: &'static str) -> Xid {
    Xid { number, meaning, class: XidClass::NeedsReset }
}

const fn lost(number: u64, meaning: &'static str) -> Xid {
    Xid { number, meaning, class: XidClass::Lost }
}

/// The XIDs in use, by number. NVIDIA marks all lower numbers that are absent here as unused.
pub static XIDS: &[Xid] = &[
    application(8, "GPU stopped processing"),
    application(11, "Invalid or corrupted push buffer stream"),
    application(13, "Graphics Engine Exception"),
    application(14, "Fake or injected error from user space"),
    application(25, "Invalid or illegal push buffer stream"),
    application(31, "GPU memory page fault"),
    application(32, "Invalid or corrupted push buffer stream"),
    application(37, "Driver firmware error"),
    application(38, "Driver firmware error"),
    application(39, "Copy Engine Exception"),
    application(40, "Copy Engine Exception"),
    application(41, "Copy Engine Exception"),
    application(43, "GPU stopped processing"),
    application(44, "Graphics Engine fault during context switch"),
    application(45, "Preemptive cleanup, due to previous errors"),
    needs_reset(46, "GPU stopped processing"),
    needs_reset(48, "Double Bit ECC Error"),
    degraded(54, "Auxiliary power is not connected to the GPU board"),
    application(60, "Video processor exception"),
    needs_reset(62, "Internal micro-controller halt"),
    // The new row takes effect at the next reset; until then the GPU can be used.
    degraded(63, "GPU memory remapping event"),
    needs_reset(64, "GPU memory remapping failure"),
    application(66, "Illegal access by driver"),
    application(67, "Illegal access by driver"),
    application(68, "NVDEC0 Exception"),
    application(69, "Graphics Engine class error"),
    application(70, "CE3: Unknown Error"),
    application(71, "CE4: Unknown Error"),
    application(72, "CE5: Unknown Error"),
    // A GPU also reports it when its neighbour fails, and works without links.
    degraded(74, "NVLINK Error"),
    application(75, "CE6: Unknown Error"),
    application(76, "CE7: Unknown Error"),
    application(77, "CE8: Unknown Error"),
    info(78, "vGPU Start Error"),
    lost(79, "GPU has fallen off the bus"),
    application(80, "Corrupted data sent to GPU"),
    application(82, "NVJPG0 Error"),
    application(83, "NVDEC1 Error"),
    application(84, "NVDEC2 Error"),
    application(85, "CE9: Unknown Error"),
    application(86, "OFA Exception"),
    application(88, "NVDEC3 Error"),
    application(89, "NVDEC4 Error"),
    degraded(92, "High single-bit ECC error rate"),
    info(93, "Non-fatal violation of provisioned InfoROM wear limit"),
    // "Applications can continue to be run until the reset can be performed."
    degraded(94, "Contained memory error"),
    needs_reset(95, "Uncontained memory error"),
    application(96, "NVDEC5 Error"),
    application(97, "NVDEC6 Error"),
    application(98, "NVDEC7 Error"),
    application(99, "NVJPG1 Error"),
    application(100, "NVJPG2 Error"),
    application(101, "NVJPG3 Error"),
    application(102, "NVJPG4 Error"),
    application(103, "NVJPG5 Error"),
    application(104, "NVJPG6 Error"),
    application(105, "NVJPG7 Error"),
    info(106, "SMBPBI Test Message"),
    info(107, "SMBPBI Test Message Silent"),
    application(108, "NVLink remote translation error"),
    // Action "reset", but a kernel that never ends provokes it. The GPU driver sets the recovery
    // action if a reset is needed (R570 and later), and NVIDIA's device plugin ignores it too.
    application(109, "Context Switch Timeout Error"),
    needs_reset(110, "Security Fault Error"),
    needs_reset(119, "GSP RPC Timeout"),
    needs_reset(120, "GSP Error"),
    info(121, "C2C Error"),
    application(126, "CE10: Unknown Error"),
    application(127, "CE11: Unknown Error"),
    application(128, "CE12: Unknown Error"),
    application(129, "CE13: Unknown Error"),
    application(130, "CE14: Unknown Error"),
    application(131, "CE15: Unknown Error"),
    application(132, "CE16: Unknown Error"),
    application(133, "CE17: Unknown Error"),
    application(134, "CE18: Unknown Error"),
    application(135, "CE19: Unknown Error"),
    needs_reset(136, "Link Training Failed"),
    application(137, "NVLink Privilege Error"),
    application(139, "OFA1 Error"),
    needs_reset(140, "ECC Unrecovered Error"),
    application(141, "CUDA Fast Path Error"),
    application(142, "NVENC3 Error"),
    needs_reset(143, "GPU Initialization Error"),
    // The sub-code decides between no action and a reset, and NVML's event has none. The GPU driver
    // sets the recovery action with each of them (R565 and later).
    info(144, "NVLINK: SAW Error"),
    info(145, "NVLINK: RLW Error"),
    info(146, "NVLINK: TLW Error"),
    info(147, "NVLINK: TREX Error"),
    info(148, "NVLINK: NVLPW_CTRL Error"),
    info(149, "NVLINK: NETIR Error"),
    info(150, "NVLINK: MSE Error"),
    // A program causes it if it does not stop its channel in time for the key rotation.
    application(151, "Key rotation Error"),
    application(152, "DLA SMMU Error"),
    application(153, "DLA timeout Error"),
    needs_reset(RECOVERY_ACTION_CHANGED, "GPU Recovery Action Changed"),
    // Also reported when a link is taken down on purpose.
    info(155, "NVLINK: SW Defined Error"),
    needs_reset(156, "Resource Retirement Event"),
    degraded(157, "Resource Retirement Failure"),
    needs_reset(158, "GPU Fatal Timeout"),
    info(159, "CHI Non-Data Error"),
    info(160, "Channel Retirement Event"),
    info(161, "Channel Retirement Failure"),
    info(162, "Power Smoothing HW Circuitry capability reengaged"),
    info(163, "Power Smoothing HW Circuitry capability disengaged"),
    info(164, "Power Smoothing HW Circuitry low lifetime reached"),
    info(165, "Power Smoothing HW Circuitry lifetime exhausted"),
    info(166, "CC traffic seen prior to link properly being configured for encrypted traffic"),
    info(167, "PCIe fatal timeout"),
    degraded(168, "Errors found in WPR (write protected region)"),
    info(169, "Internal micro-controller halt"),
    info(170, "Interrupt seen in CC mode"),
    // Details of an XID 48.
    info(171, "Uncorrectable DRAM error"),
    info(172, "Uncorrectable SRAM error"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_without_duplicates() {
        assert!(XIDS.is_sorted_by(|one, two| one.number < two.number));
        assert_eq!(find(UNKNOWN_XID), None, "an unknown XID has no class");
        assert_eq!((class_name(31), class_name(12)), ("application", "unknown"));
    }

    fn check(numbers: &[u64], state: Option<HealthState>) {
        for number in numbers {
            let xid = find(*number).unwrap_or_else(|| panic!("XID {number} is not in the table"));
            assert_eq!(xid.class.state(), state, "XID {number}");
        }
    }

    #[test]
    fn xids_that_a_program_can_cause_change_no_state() {
        // NVIDIA's device plugin and DRA driver ignore these.
        check(&[13, 31, 43, 45, 68, 109], None);
        // The action is RESTART_APP. XID 94 has it too, but the hardware causes that one.
        check(&[8, 11, 25, 32, 39, 40, 41, 60, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83], None);
        check(&[84, 85, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 135, 139], None);
    }

    #[test]
    fn xids_of_failed_hardware_change_the_state() {
        check(&[63, 74, 92, 94, 157], Some(HealthState::Degraded));
        check(
            &[46, 48, 62, 64, 95, 110, 119, 120, 136, 140, 143, 154, 156, 158],
            Some(HealthState::NeedsReset),
        );
        check(&[79], Some(HealthState::Lost));
    }
}
