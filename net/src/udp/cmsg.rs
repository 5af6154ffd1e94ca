//! Control messages (ancillary data) of socket calls, written and parsed as bytes.
//!
//! The layout is that of `cmsg(3)` on Linux: a length of one machine word that includes the header,
//! two `int`s for level and type, the data, then padding to a word. Code that works on bytes needs
//! no pointers, and the parser checks every length that the kernel returns.

use libc::c_int;

/// Buffer size for the control messages of one message: at most three of 24 bytes and one of
/// 32 bytes are used.
pub(super) const SPACE: usize = 128;

const WORD: usize = size_of::<usize>();
const HEADER: usize = WORD + 2 * size_of::<c_int>();
const _: () =
    assert!(HEADER == size_of::<libc::cmsghdr>(), "the header has the layout of 64-bit Linux");
const _: () = assert!(HEADER.is_multiple_of(WORD), "data follows the header unpadded");

/// Buffer of control messages.
#[derive(Debug, Clone, Copy)]
#[repr(align(8))]
pub(super) struct Control([u8; SPACE]);

impl Control {
    pub(super) const fn new() -> Self {
        Self([0; SPACE])
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Appends one message after the first `used` bytes. Returns the new number of used bytes.
    pub(super) fn push(&mut self, used: usize, level: c_int, kind: c_int, data: &[u8]) -> usize {
        let len = HEADER + data.len();
        let end = used + len.next_multiple_of(WORD);
        let to = &mut self.0[used..end];
        to[..WORD].copy_from_slice(&len.to_ne_bytes());
        to[WORD..WORD + 4].copy_from_slice(&level.to_ne_bytes());
        to[WORD + 4..HEADER].copy_from_slice(&kind.to_ne_bytes());
        to[HEADER..len].copy_from_slice(data);
        end
    }

    /// Returns the messages in the first `used` bytes, which the kernel wrote.
    pub(super) fn messages(&self, used: usize) -> Messages<'_> {
        Messages { rest: &self.0[..used.min(SPACE)] }
    }
}

/// Received control message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message<'a> {
    pub(super) level: c_int,
    pub(super) kind: c_int,
    data: &'a [u8],
}

impl Message<'_> {
    /// Returns the data as an `int` if it has the size of one.
    pub(super) fn int(&self) -> Option<c_int> {
        Some(c_int::from_ne_bytes(self.data.try_into().ok()?))
    }

    /// Returns the data as nanoseconds if it has the size of a `struct timespec`.
    pub(super) fn nanos(&self) -> Option<i64> {
        let (seconds, nanos) = self.data.split_first_chunk::<8>()?;
        let (seconds, nanos) =
            (i64::from_ne_bytes(*seconds), i64::from_ne_bytes(nanos.try_into().ok()?));
        seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
    }

    /// Returns the first byte. The kernel reports an IPv4 TOS as one byte, although the socket
    /// option is an `int`.
    pub(super) fn byte(&self) -> Option<u8> {
        self.data.first().copied()
    }
}

/// Iterator over control messages, which ends at the first incomplete one.
pub(super) struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let (len, after) = self.rest.split_first_chunk::<WORD>()?;
        let (level, after) = after.split_first_chunk::<4>()?;
        let (kind, _) = after.split_first_chunk::<4>()?;
        let len = usize::from_ne_bytes(*len);
        let data = self.rest.get(HEADER..len)?;
        let (level, kind) = (c_int::from_ne_bytes(*level), c_int::from_ne_bytes(*kind));
        // The last message may lack its padding.
        self.rest = self.rest.get(len.next_multiple_of(WORD)..).unwrap_or_default();
        Some(Message { level, kind, data })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> (Control, usize) {
        let mut control = Control([0xa5; SPACE]);
        let used = control.push(0, libc::SOL_UDP, libc::UDP_SEGMENT, &1472u16.to_ne_bytes());
        let used = control.push(used, libc::IPPROTO_IP, libc::IP_TOS, &3i32.to_ne_bytes());
        (control, used)
    }

    #[test]
    fn what_is_written_is_read() {
        let (control, used) = two();
        assert_eq!(used, 2 * (HEADER + WORD));
        let got: Vec<_> = control.messages(used).collect();
        assert_eq!(got.len(), 2);
        assert_eq!((got[0].level, got[0].kind), (libc::SOL_UDP, libc::UDP_SEGMENT));
        assert_eq!(got[0].data, 1472u16.to_ne_bytes());
        assert_eq!(got[0].int(), None, "two bytes are not an int");
        assert_eq!(got[1].int(), Some(3));
    }

    #[test]
    fn a_time_is_read_unless_it_overflows() {
        let read = |seconds: i64, nanos: i64| {
            let mut control = Control::new();
            let data = [seconds.to_ne_bytes(), nanos.to_ne_bytes()].concat();
            let used = control.push(0, libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, &data);
            control.messages(used).next().and_then(|message| message.nanos())
        };
        assert_eq!(read(1_700_000_000, 5), Some(1_700_000_000_000_000_005));
        assert_eq!(read(i64::MAX, 0), None);
    }

    #[test]
    fn the_layout_is_what_libc_computes() {
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute numbers.
        #[expect(unsafe_code, reason = "libc marks these computations unsafe")]
        let (space, len) = unsafe { (libc::CMSG_SPACE(2), libc::CMSG_LEN(2)) };
        let (control, used) = two();
        assert_eq!(used / 2, space as usize);
        assert_eq!(control.0[..WORD], (len as usize).to_ne_bytes());
    }

    #[test]
    fn every_truncation_and_any_length_is_survived() {
        let (mut control, used) = two();
        for cut in 0..=used {
            assert!(control.messages(cut).count() <= 2);
        }
        for bad in [0, 1, HEADER - 1, SPACE + 1, usize::MAX - 3, usize::MAX] {
            control.0[..WORD].copy_from_slice(&bad.to_ne_bytes());
            assert_eq!(control.messages(used).count(), 0, "{bad}");
        }
        assert_eq!(control.messages(usize::MAX).count(), 0);
    }
}
