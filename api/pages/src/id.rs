//! Identifiers on the pages: short texts of fixed size, and UUIDs as bytes.

use core::fmt;

/// A text of at most `N` bytes, padded with zeros, for Kubernetes UIDs and PCI bus ids.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text<const N: usize>([u8; N]);

impl<const N: usize> Text<N> {
    /// The empty text.
    pub const EMPTY: Self = Self([0; N]);

    /// The text; `None` if it is too long, or has blanks or characters that are not printable
    /// ASCII.
    pub fn new(text: &str) -> Option<Self> {
        if text.len() > N || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let mut space = [0; N];
        space.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Some(Self(space))
    }

    /// The text in the bytes of a page; `None` for bytes that [`Text::new`] never produces.
    #[cold]
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let (text, padding) = bytes.split_at(length);
        let is_one = text.iter().all(u8::is_ascii_graphic) && padding.iter().all(|byte| *byte == 0);
        bytes.try_into().ok().filter(|_| is_one).map(Self)
    }

    /// The bytes with the padding.
    pub fn bytes(&self) -> &[u8; N] {
        &self.0
    }

    /// The text without its padding.
    pub fn as_str(&self) -> &str {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(N);
        self.0.get(..length).and_then(|text| core::str::from_utf8(text).ok()).unwrap_or_default()
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl<const N: usize> fmt::Display for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The UUID of a GPU or a MIG instance: the sixteen bytes of `CUuuid`, in the order of the
/// hexadecimal digits of NVML's `GPU-…` or `MIG-…` text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(pub [u8; 16]);

impl GpuUuid {
    /// Parses `GPU-…`, `MIG-…` or the bare UUID.
    pub fn parse(text: &str) -> Option<Self> {
        Self::read(text.as_bytes())
    }

    /// Parses bytes that may not be UTF-8.
    pub fn read(text: &[u8]) -> Option<Self> {
        let digits = text.strip_prefix(b"GPU-").or_else(|| text.strip_prefix(b"MIG-")).unwrap_or(text);
        let mut bytes = [0; 16];
        let mut count = 0;
        for (place, byte) in digits.iter().copied().enumerate() {
            if matches!(place, 8 | 13 | 18 | 23) {
                if byte != b'-' {
                    return None;
                }
                continue;
            }
            let digit = u8::try_from(char::from(byte).to_digit(16)?).ok()?;
            let space: &mut u8 = bytes.get_mut(count / 2)?;
            *space = *space << 4 | digit;
            count += 1;
        }
        (count == 32).then_some(Self(bytes))
    }

    /// `None` for all zeros, which stand for "no UUID".
    pub fn none_if_zero(self) -> Option<Self> {
        (self.0 != [0; 16]).then_some(self)
    }
}

impl fmt::Display for GpuUuid {
    /// Writes the bare UUID, without NVML's prefix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, byte) in self.0.iter().enumerate() {
            if matches!(place, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_parsed_with_and_without_prefix() {
        let text = "6f1d2c3b-0001-4a5b-8c7d-00112233aaff";
        for prefix in ["GPU-", "MIG-", ""] {
            let uuid = GpuUuid::parse(&format!("{prefix}{text}")).expect("a UUID");
            assert_eq!(uuid.to_string(), text);
        }
        for bad in ["", "GPU-", "GPU-6f1d2c3b", &text[1..], &format!("{text}0"), &text.replace('-', "0")] {
            assert_eq!(GpuUuid::parse(bad), None, "{bad}");
        }
        assert_eq!(GpuUuid::read(&[0xff; 36]), None);
    }

    #[test]
    fn text_has_a_maximum_length() {
        assert_eq!(Text::<4>::new("abcd").expect("fits").as_str(), "abcd");
        assert_eq!(Text::<4>::new("abcde"), None);
        assert_eq!(Text::<4>::new("a b"), None);
        assert_eq!(Text::<4>::read(b"a\0b\0"), None);
        assert_eq!(Text::<4>::read(b"ab\0\0").expect("padded").as_str(), "ab");
    }
}
