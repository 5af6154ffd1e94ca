//! Socket filters with which the kernel drops datagrams of refused senders before they take space
//! in a receive buffer.
//!
//! The filters are programs of classic BPF (McCanne and Jacobson, USENIX 1993), which need no
//! privilege.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::SockFilter;

use super::UdpSocket;

impl UdpSocket {
    /// Makes the kernel drop future datagrams from these addresses. The list replaces the previous
    /// one, and an empty list refuses no sender. Datagrams that have already arrived stay.
    ///
    /// ```
    /// # use racksum_net::udp::{UdpConfig, UdpSocket};
    /// let socket = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    /// socket.refuse(&["127.0.0.1:9".parse().unwrap()]).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, for example if there are too many senders. The previous list
    /// then stays in force.
    pub fn refuse(&self, senders: &[SocketAddr]) -> io::Result<()> {
        if senders.is_empty() {
            return match self.socket().detach_filter() {
                // The socket had no filter.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                done => done,
            };
        }
        let mut program: Vec<_> = senders.iter().flat_map(refusal).collect();
        program.push(ret(WHOLE));
        if program.len() > MOST_INSTRUCTIONS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many senders for one socket filter",
            ));
        }
        self.socket().attach_filter(&program)
    }
}

/// Returns instructions that drop the datagrams of one sender. For other senders, the program
/// continues after these instructions.
fn refusal(sender: &SocketAddr) -> Vec<SockFilter> {
    let words: Vec<(u32, u32)> =
        match sender.ip() {
            IpAddr::V4(ip) => vec![(IPV4_SOURCE, ip.to_bits())],
            IpAddr::V6(ip) => (IPV6_SOURCE..)
                .step_by(4)
                .zip(ip.octets().chunks_exact(4).map(|word| {
                    u32::from_be_bytes(word.try_into().expect("a chunk has four bytes"))
                }))
                .collect(),
        };
    let port = [load_half(SOURCE_PORT), skip_unless(sender.port().into(), 1), ret(0)];
    let mut behind = 2 * words.len() + port.len();
    let mut program = Vec::new();
    for (at, word) in words {
        behind -= 2;
        program.extend([load_word(at), skip_unless(word, behind)]);
    }
    program.extend(port);
    program
}

fn load_word(at: u32) -> SockFilter {
    SockFilter::new(code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), 0, 0, at)
}

fn load_half(at: u32) -> SockFilter {
    SockFilter::new(code(libc::BPF_LD | libc::BPF_H | libc::BPF_ABS), 0, 0, at)
}

/// Returns an instruction that skips the next `instructions` instructions unless the loaded value
/// is `value`.
fn skip_unless(value: u32, instructions: usize) -> SockFilter {
    let behind = u8::try_from(instructions).expect("a refusal has at most 11 instructions");
    SockFilter::new(code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K), 0, behind, value)
}

/// Returns an instruction that accepts `bytes` bytes of the datagram; 0 drops it.
fn ret(bytes: u32) -> SockFilter {
    SockFilter::new(code(libc::BPF_RET | libc::BPF_K), 0, 0, bytes)
}

fn code(code: u32) -> u16 {
    u16::try_from(code).expect("BPF codes fit into 16 bits")
}

const WHOLE: u32 = u32::MAX;

/// Linux's limit on the instructions of one program.
const MOST_INSTRUCTIONS: usize = 4096;

/// Offset at which a load instruction finds the network header. Offset 0 is the UDP header.
const NETWORK_HEADER: u32 = 0xfff0_0000;
const IPV4_SOURCE: u32 = NETWORK_HEADER + 12;
const IPV6_SOURCE: u32 = NETWORK_HEADER + 8;
const SOURCE_PORT: u32 = 0;
