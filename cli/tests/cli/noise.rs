//! Random datagrams to every UDP port of every process of a job do not change the sums.

use std::collections::BTreeSet;
use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

use crate::process::Process;
use crate::waits::await_that;

/// Returns the UDP ports that a process has open.
fn ports(id: u32) -> BTreeSet<u16> {
    let Ok(files) = std::fs::read_dir(format!("/proc/{id}/fd")) else { return BTreeSet::new() };
    let sockets: BTreeSet<String> = files
        .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
        .filter_map(|link| {
            let link = link.to_str()?.to_owned();
            Some(link.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = Path::new("/proc").join(id.to_string()).join("net/udp");
    let table = std::fs::read_to_string(table).unwrap_or_default();
    let port = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let port = u16::from_str_radix(fields.get(1)?.split_once(':')?.1, 16).ok()?;
        sockets.contains(*fields.get(9)?).then_some(port)
    };
    table.lines().skip(1).filter_map(port).collect()
}

#[test]
fn noise_at_every_port_of_a_running_job_changes_no_sum() {
    let flags = ["-b", "1M", "-e", "1M", "-n", "60", "--density", "0.5", "--shards", "2"];
    let mut parent =
        Process::start(&[&["bench", "--workers", "3", "--fanout", "unicast"][..], &flags].concat());
    // The aggregator has one control port and two data ports; each rank has one port of each kind.
    await_that("all ports are open", || {
        let all = parent.children().into_iter().chain([parent.id()]);
        all.map(|id| ports(id).len()).sum::<usize>() >= 3 + 3 * 2
    });
    let noise = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut state = 1u64;
    let mut sent = 0;
    while sent < 6000 && parent.runs() {
        let targets: BTreeSet<u16> =
            parent.children().into_iter().chain([parent.id()]).flat_map(ports).collect();
        for _ in 0..20 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let len = usize::try_from(state >> 33).unwrap() % 1400;
            let mut datagram: Vec<u8> =
                (0..len).map(|i| (state >> (i % 57)).to_le_bytes()[0]).collect();
            if len > 8 && state >> 40 & 1 == 0 {
                datagram[..3].copy_from_slice(b"RS\x01");
                datagram[3] %= 11;
            }
            for port in &targets {
                // Ignore errors: the process may have ended.
                noise.send_to(&datagram, ("127.0.0.1", *port)).unwrap_or(0);
                sent += 1;
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(sent > 500, "{sent}");
    let ended = parent.end(60).ok();
    assert_eq!(ended.out.lines().filter(|line| !line.starts_with('#')).count(), 1, "{ended:?}");
}
