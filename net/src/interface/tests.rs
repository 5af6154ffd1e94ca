use super::*;

fn interface(name: &str, index: u32) -> Interface {
    Interface {
        name: name.to_owned(),
        index,
        mtu: 1500,
        addrs: vec![IpAddr::from([10, 0, 0, 1])],
        is_up: true,
        is_loopback: name == "lo",
        is_multicast: name != "lo",
    }
}

fn host() -> Vec<Interface> {
    let names = ["lo", "eth0", "eth1", "eth10", "ens3", "docker0", "docker1"];
    let mut all: Vec<Interface> = (1..).zip(names).map(|(i, name)| interface(name, i)).collect();
    all.push(Interface { is_up: false, ..interface("eth2", 8) });
    all.push(Interface { addrs: Vec::new(), ..interface("eth3", 9) });
    all
}

#[test]
fn patterns_follow_the_grammar_of_nccl() {
    let cases: &[(&str, &[&str])] = &[
        ("eth", &["eth0", "eth1", "eth10"]),
        ("eth1", &["eth1", "eth10"]),
        ("=eth1", &["eth1"]),
        ("=eth1,ens3", &["eth1", "ens3"]),
        ("ens,eth0", &["eth0", "ens3"]),
        ("^docker,lo", &["eth0", "eth1", "eth10", "ens3"]),
        ("^=docker0,lo", &["eth0", "eth1", "eth10", "ens3", "docker1"]),
        (" eth0 , ens ", &["eth0", "ens3"]),
        ("lo", &["lo"]),
        ("", &["eth0", "eth1", "eth10", "ens3"]),
    ];
    let host = host();
    for (pattern, want) in cases {
        let got: Vec<&str> =
            select(&host, pattern).unwrap().iter().map(|i| i.name.as_str()).collect();
        assert_eq!(got, *want, "{pattern:?}");
    }
}

#[test]
fn a_blank_pattern_takes_loopback_where_there_is_nothing_else() {
    let only = [interface("lo", 1)];
    assert_eq!(select(&only, " ").unwrap()[0].name, "lo");
}

#[test]
fn a_pattern_that_fits_nothing_says_what_there_is() {
    let host = [interface("lo", 1), interface("eth0", 2)];
    let usable = |host: &[Interface], pattern: &str| match select(host, pattern) {
        Err(NetError::NoInterface { usable, .. }) => usable,
        other => panic!("{other:?}"),
    };
    assert_eq!(usable(&host, "=ib0"), "lo, eth0");
    assert_eq!(usable(&[], "eth"), "none");
    for nothing in ["^", "=", "^=", ",", "^=,"] {
        assert!(matches!(select(&host, nothing), Err(NetError::EmptyPattern { .. })), "{nothing}");
    }
}

#[test]
fn a_datagram_is_the_mtu_less_its_headers() {
    assert_eq!(max_datagram(1500, false).unwrap(), 1472);
    assert_eq!(max_datagram(1500, true).unwrap(), 1452);
    assert_eq!(max_datagram(9000, false).unwrap(), 8972);
    assert_eq!(max_datagram(65_536, false).unwrap(), 65_507);
    assert_eq!(max_datagram(65_536, true).unwrap(), 65_488);
    assert_eq!(max_datagram(1_000_000, true).unwrap(), 65_507);
    assert_eq!(max_datagram(1280, true).unwrap(), 1232);
    let error = max_datagram(1279, false).unwrap_err();
    assert!(matches!(error, NetError::MtuTooSmall { mtu: 1279 }), "{error}");
    assert!(error.to_string().contains("at least 1280"), "{error}");
}

#[test]
fn this_host_has_a_loopback_interface() {
    let all = interfaces().unwrap();
    let lo = all.iter().find(|i| i.is_loopback && i.is_up).expect("loopback is up");
    assert!(lo.mtu >= 1280);
    assert!(lo.index > 0);
    assert!(lo.addrs.contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
    let mut indices: Vec<u32> = all.iter().map(|i| i.index).collect();
    indices.dedup();
    assert_eq!(indices.len(), all.len(), "each interface is listed once");
}

#[test]
fn an_address_finds_its_interface() {
    let lo = interface_of(Ipv4Addr::LOCALHOST.into()).expect("127.0.0.1 belongs to an interface");
    assert!(lo.is_loopback);
    assert_eq!(interface_of(IpAddr::from([127, 0, 0, 9])), Some(lo));
    // An address of TEST-NET-3 that no host has.
    assert_eq!(interface_of(IpAddr::from([203, 0, 113, 77])), None);
}

#[test]
fn the_way_to_loopback_is_loopback() {
    let peer: SocketAddr = "127.0.0.1:9".parse().unwrap();
    assert_eq!(local_addr_towards(peer).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    let loopback = interface_of(peer.ip()).unwrap();
    // The kernel sends no packet of more than 65,535 bytes, even if the MTU is larger.
    assert_eq!(path_mtu(peer.ip(), peer).unwrap(), loopback.mtu.min(65_535));
}

#[test]
fn loopback_leads_to_this_host_alone() {
    let lo = IpAddr::from([127, 0, 0, 1]);
    assert!(leads_to(lo, "127.0.0.1:9".parse().unwrap()));
    assert!(!leads_to(lo, "192.0.2.1:9".parse().unwrap()));
}

#[test]
fn an_address_of_no_host_is_told_from_one_of_some_host() {
    let reason = |ip: &str| no_host(ip.parse().unwrap()).unwrap_or_default();
    for ip in ["127.0.0.1", "192.0.2.1", "::1", "2001:db8::1"] {
        assert_eq!(reason(ip), "", "{ip}");
    }
    for (ip, why) in [
        ("0.0.0.0", "not a host's address"),
        ("::ffff:127.0.0.1", "(write 127.0.0.1)"),
        ("::", "not a host's address"),
        ("224.0.0.1", "a multicast group"),
        ("ff15::1", "a multicast group"),
        ("255.255.255.255", "a broadcast address"),
        // The broadcast address of the loopback network.
        ("127.255.255.255", "a broadcast address"),
    ] {
        assert!(reason(ip).contains(why), "{ip}: {}", reason(ip));
    }
}
