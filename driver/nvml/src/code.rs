//! All of NVML's return codes. A code that this list does not know becomes [`Code::Other`], so a
//! newer GPU driver causes no parse error.

use std::fmt;

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// The return code of a failed call.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code {
            $($name,)*
            /// A code that is newer than this list.
            Other(u32),
        }

        impl From<u32> for Code {
            fn from(number: u32) -> Self {
                match number {
                    $($number => Self::$name,)*
                    other => Self::Other(other),
                }
            }
        }

        impl Code {
            /// The number in `nvmlReturn_t`.
            pub fn number(self) -> u32 {
                match self {
                    $(Self::$name => $number,)*
                    Self::Other(number) => number,
                }
            }

            fn text(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Other(_) => "unknown return code",
                }
            }
        }
    };
}

codes! {
    Uninitialized = 1, "NVML is not initialised";
    InvalidArgument = 2, "invalid argument";
    NotSupported = 3, "not supported";
    NoPermission = 4, "no permission; run the driver as root with all GPU device nodes";
    AlreadyInitialized = 5, "already initialised";
    NotFound = 6, "not found";
    InsufficientSize = 7, "buffer too small";
    InsufficientPower = 8, "external power cables are not attached";
    DriverNotLoaded = 9, "the GPU driver is not loaded";
    Timeout = 10, "timed out";
    IrqIssue = 11, "the kernel found an interrupt problem with a GPU";
    LibraryNotFound = 12, "the NVML library was not found";
    FunctionNotFound = 13, "this GPU driver has no such function";
    CorruptedInforom = 14, "the infoROM is corrupted";
    GpuIsLost = 15, "the GPU is lost";
    ResetRequired = 16, "the GPU needs a reset";
    OperatingSystem = 17, "blocked by the operating system";
    LibRmVersionMismatch = 18, "library and kernel module versions differ; reload the module or reboot";
    InUse = 19, "in use by another client";
    Memory = 20, "out of memory";
    NoData = 21, "no data";
    VgpuEccNotSupported = 22, "not available on vGPU with ECC";
    InsufficientResources = 23, "insufficient resources on the GPU";
    FreqNotSupported = 24, "frequency not supported";
    ArgumentVersionMismatch = 25, "argument version mismatch";
    Deprecated = 26, "deprecated";
    NotReady = 27, "not ready";
    GpuNotFound = 28, "no GPU was found";
    InvalidState = 29, "invalid state";
    ResetTypeNotSupported = 30, "reset type not supported";
    Unknown = 999, "unknown error";
}

impl Code {
    /// Whether the handle of the GPU may be stale, so that it must be looked up again.
    pub(crate) fn is_stale_handle(self) -> bool {
        matches!(self, Self::InvalidArgument | Self::Uninitialized | Self::GpuNotFound)
    }

    /// Whether a call with this code was rejected before it changed anything. After a timeout or an
    /// unknown error, the call may have had an effect.
    pub fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::Uninitialized
                | Self::InvalidArgument
                | Self::NotSupported
                | Self::NoPermission
                | Self::NotFound
                | Self::InsufficientSize
                | Self::DriverNotLoaded
                | Self::FunctionNotFound
                | Self::ResetRequired
                | Self::InUse
                | Self::InsufficientResources
                | Self::ArgumentVersionMismatch
                | Self::GpuNotFound
                | Self::InvalidState
        )
    }
}

impl fmt::Display for Code {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (NVML code {})", self.text(), self.number())
    }
}

#[cfg(test)]
mod tests {
    use super::Code;

    #[test]
    fn codes_round_trip_through_numbers() {
        for number in (1..=40).chain([998, 999, 1000, u32::MAX]) {
            assert_eq!(Code::from(number).number(), number);
        }
    }
}
