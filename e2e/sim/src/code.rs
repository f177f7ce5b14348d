//! NVML's return codes.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        /// `nvmlReturn_t`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(into = "u32", try_from = "u32")]
        #[repr(u32)]
        pub enum Code { $($name = $number,)* }

        impl Code {
            /// All codes, in ascending order.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name without `NVML_ERROR_`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

codes! {
    Success = 0, "SUCCESS";
    Uninitialized = 1, "UNINITIALIZED";
    InvalidArgument = 2, "INVALID_ARGUMENT";
    NotSupported = 3, "NOT_SUPPORTED";
    NoPermission = 4, "NO_PERMISSION";
    AlreadyInitialized = 5, "ALREADY_INITIALIZED";
    NotFound = 6, "NOT_FOUND";
    InsufficientSize = 7, "INSUFFICIENT_SIZE";
    InsufficientPower = 8, "INSUFFICIENT_POWER";
    DriverNotLoaded = 9, "DRIVER_NOT_LOADED";
    Timeout = 10, "TIMEOUT";
    IrqIssue = 11, "IRQ_ISSUE";
    LibraryNotFound = 12, "LIBRARY_NOT_FOUND";
    FunctionNotFound = 13, "FUNCTION_NOT_FOUND";
    CorruptedInforom = 14, "CORRUPTED_INFOROM";
    GpuIsLost = 15, "GPU_IS_LOST";
    ResetRequired = 16, "RESET_REQUIRED";
    OperatingSystem = 17, "OPERATING_SYSTEM";
    LibRmVersionMismatch = 18, "LIB_RM_VERSION_MISMATCH";
    InUse = 19, "IN_USE";
    Memory = 20, "MEMORY";
    NoData = 21, "NO_DATA";
    VgpuEccNotSupported = 22, "VGPU_ECC_NOT_SUPPORTED";
    InsufficientResources = 23, "INSUFFICIENT_RESOURCES";
    FreqNotSupported = 24, "FREQ_NOT_SUPPORTED";
    ArgumentVersionMismatch = 25, "ARGUMENT_VERSION_MISMATCH";
    Deprecated = 26, "DEPRECATED";
    NotReady = 27, "NOT_READY";
    GpuNotFound = 28, "GPU_NOT_FOUND";
    InvalidState = 29, "INVALID_STATE";
    ResetTypeNotSupported = 30, "RESET_TYPE_NOT_SUPPORTED";
    Unknown = 999, "UNKNOWN";
}

impl From<Code> for u32 {
    fn from(code: Code) -> Self {
        code as Self
    }
}

/// NVML has no return code with that number or name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no NVML return code {0:?}; give a name such as IN_USE or a number such as 19")]
pub struct NoSuchCode(String);

impl TryFrom<u32> for Code {
    type Error = NoSuchCode;

    fn try_from(number: u32) -> Result<Self, NoSuchCode> {
        Self::ALL
            .iter()
            .copied()
            .find(|code| u32::from(*code) == number)
            .ok_or_else(|| NoSuchCode(number.to_string()))
    }
}

impl FromStr for Code {
    type Err = NoSuchCode;

    /// Accepts `IN_USE`, `in-use`, `NVML_ERROR_IN_USE` and `19`.
    fn from_str(text: &str) -> Result<Self, NoSuchCode> {
        if let Ok(number) = text.parse::<u32>() {
            return Self::try_from(number);
        }
        let name = text.to_ascii_uppercase().replace('-', "_");
        let name = name.strip_prefix("NVML_ERROR_").unwrap_or(&name);
        Self::ALL.iter().copied().find(|code| code.name() == name).ok_or_else(|| NoSuchCode(text.to_owned()))
    }
}

impl fmt::Display for Code {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl std::error::Error for Code {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_through_name_and_number() {
        for code in Code::ALL {
            assert_eq!(code.name().parse(), Ok(*code));
            assert_eq!(u32::from(*code).to_string().parse(), Ok(*code));
        }
        assert!("31".parse::<Code>().is_err());
        assert!("IN_USES".parse::<Code>().is_err());
    }
}
