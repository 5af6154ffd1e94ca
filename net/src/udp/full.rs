//! Check for a receive buffer that is nearly full.
#![expect(unsafe_code, reason = "getsockopt writes the memory use of a socket through a pointer")]

use std::os::fd::AsRawFd;

use super::UdpSocket;

impl UdpSocket {
    /// Returns whether unread datagrams take more than three quarters of the receive buffer; false
    /// if the kernel does not report how much they take.
    ///
    /// ```
    /// # use racksum_net::udp::{UdpConfig, UdpSocket};
    /// let socket = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    /// assert!(!socket.is_full());
    /// ```
    #[must_use]
    pub fn is_full(&self) -> bool {
        let mut memory = [0_u32; FIELDS];
        #[expect(clippy::cast_possible_truncation, reason = "the size is 36 bytes")]
        let mut len = size_of_val(&memory) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, the size of `memory`, and every bit
        // pattern is valid.
        let rc = unsafe {
            libc::getsockopt(
                self.socket().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_MEMINFO,
                memory.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let [waits, room, ..] = memory.map(u64::from);
        rc == 0 && waits * 4 > room * 3
    }
}

/// Socket option from Linux's `asm-generic/socket.h`; libc defines only the indexes of its fields.
const SO_MEMINFO: libc::c_int = 55;
/// Number of fields of the option, as `linux/sock_diag.h` lists them. The first two are the memory
/// that unread datagrams take and the size of the receive buffer.
const FIELDS: usize = 9;
const _: () = assert!(libc::SK_MEMINFO_RMEM_ALLOC == 0 && libc::SK_MEMINFO_RCVBUF == 1);
