use super::*;

pub(crate) fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

pub(crate) fn route(to: &str, from: &str) -> Route {
    Route { to: addr(to), from: addr(from), interface: None, is_chosen: false }
}

#[test]
fn data_leaves_by_the_one_way_there_is_or_by_the_kernels_choice() {
    let one = route("192.0.2.1:7", "192.0.2.9:0");
    let same = route("192.0.2.2:7", "192.0.2.9:0");
    let other = route("198.51.100.1:7", "198.51.100.9:0");
    assert_eq!(data_addr(&[one, same]).unwrap(), addr("192.0.2.9:0"));
    let one = route("192.0.2.1:7", "192.0.2.9:0");
    assert_eq!(data_addr(&[one, other]).unwrap(), addr("0.0.0.0:0"));
    let hosts = ["[2001:db8::9]:0", "[2001:db8::a]:0"].map(|from| route("[2001:db8::1]:7", from));
    assert_eq!(data_addr(&hosts[..1]).unwrap(), addr("[2001:db8::9]:0"));
    assert_eq!(data_addr(&hosts).unwrap(), addr("[::]:0"));
}

#[test]
fn aggregators_of_two_ip_versions_are_refused_by_their_addresses() {
    let routes = [route("192.0.2.1:7", "192.0.2.9:0"), route("[2001:db8::1]:7", "[2001:db8::9]:0")];
    let error = data_addr(&routes).unwrap_err().to_string();
    assert!(error.contains("192.0.2.1:7 and [2001:db8::1]:7"), "{error}");
}

fn interface(name: &str, addrs: &[&str]) -> Interface {
    Interface {
        name: name.into(),
        index: 1,
        mtu: 1500,
        addrs: addrs.iter().map(|ip| ip.parse().unwrap()).collect(),
        is_up: true,
        is_loopback: name == "lo",
        is_multicast: true,
    }
}

#[test]
fn a_rank_calls_from_the_interface_that_was_chosen() {
    let all = [
        interface("lo", &["127.0.0.1", "::1"]),
        interface("eth0", &["192.0.2.9", "2001:db8::9", "fe80::9"]),
        interface("eth1", &["198.51.100.9"]),
    ];
    let chosen = |pattern, to| choose(&all, pattern, addr(to)).unwrap().map(|ip| ip.to_string());
    assert_eq!(chosen("eth1", "192.0.2.1:7").as_deref(), Some("198.51.100.9"));
    assert_eq!(chosen("^lo,eth1", "192.0.2.1:7").as_deref(), Some("192.0.2.9"));
    assert_eq!(chosen("eth", "[2001:db8::1]:7").as_deref(), Some("2001:db8::9"));
    assert_eq!(chosen("eth", "[fe80::1%2]:7").as_deref(), Some("fe80::9"));
    assert_eq!(chosen("eth1", "127.0.0.1:7"), None, "a loopback address leaves no choice");
}

#[test]
fn an_interface_that_cannot_call_the_aggregator_is_refused_by_name() {
    let all = [interface("eth1", &["198.51.100.9"])];
    let refused = |pattern, to| choose(&all, pattern, addr(to)).unwrap_err().to_string();
    assert_eq!(
        refused("eth1", "[2001:db8::1]:7"),
        "cannot reach [2001:db8::1]:7 from the interfaces that \"eth1\" selects (eth1): none of \
         their addresses has a route to it; choose another interface"
    );
    // The kernel sends nothing from loopback to another host, even if it has a route.
    let lo = choose(&[interface("lo", &["127.0.0.1"])], "lo", addr("192.0.2.1:7")).unwrap_err();
    assert!(lo.to_string().starts_with("cannot reach 192.0.2.1:7 from the interfaces"), "{lo}");
    let none = refused("ib", "192.0.2.1:7");
    assert!(none.contains("no usable interface matches \"ib\""), "{none}");
    let none = refused("ib", "127.0.0.1:7");
    assert!(none.contains("no usable interface matches \"ib\""), "{none}");
}

#[test]
fn no_aggregator_may_be_named_twice() {
    let routes = ["192.0.2.1:1", "192.0.2.1:2", "192.0.2.1:1"].map(|to| route(to, "192.0.2.9:0"));
    check_routes(&routes[..2]).unwrap();
    let error = check_routes(&routes).unwrap_err().to_string();
    assert_eq!(error, "the aggregator 192.0.2.1:1 is listed twice; list each aggregator once");
}

#[test]
fn a_text_that_may_be_an_address_is_left_to_the_resolver() {
    let names = ["a:1", "a.b-c.example:7177", "a_b:1", "h.:1"];
    let literals = ["192.0.2.1:1", "[::1]:1", "[2001:db8::1]:7"];
    for text in names.into_iter().chain(literals) {
        check_address(text).unwrap_or_else(|error| panic!("{error}"));
    }
    let error_of = |text| check_address(text).unwrap_err().to_string();
    assert_eq!(
        error_of("a"),
        "\"a\" is not an aggregator address (HOST:PORT): the port is missing"
    );
    for text in ["::1:7177", "fe80::1%eth0:7177", "[fe80::1%]:7177"] {
        assert!(error_of(text).ends_with("with a port as [ADDRESS]:PORT"), "{text}");
    }
    for text in ["[fe80::1]:7", "[fe80::1%3]:7", "[fe80::1%eth0.2]:7"] {
        let why = "link-local addresses (fe80::/10) are not supported; ";
        assert!(error_of(text).contains(why), "{text}");
    }
    for text in ["a:70000", "192.0.2.1:70000", "[::1]:70000", "a:b", "192.0.2.1:"] {
        assert!(error_of(text).ends_with("its port must be a number from 1 to 65535"), "{text}");
    }
    for (text, why) in [
        ("0.0.0.0:7177", "its host is 0.0.0.0, which is not a host's address"),
        ("[::ffff:10.0.0.1]:7177", "which is an IPv4-mapped address (write 10.0.0.1)"),
        ("[::]:7177", "its host is ::, which is not a host's address"),
        ("224.0.0.1:7177", "its host is 224.0.0.1, which is a multicast group"),
        ("255.255.255.255:7177", "its host is 255.255.255.255, which is a broadcast address"),
    ] {
        assert!(error_of(text).contains(why), "{}", error_of(text));
    }
    assert!(error_of("http://192.0.2.1:7177").ends_with("remove the scheme and ://"));
    assert!(
        error_of("unix:/run/racksum.sock").ends_with("give the HOST:PORT of an aggregator here")
    );
    assert!(error_of("192.0.2.256:7177").ends_with("neither a name nor an IP address"));
}

#[test]
fn a_name_that_does_not_resolve_is_no_fault_of_the_caller() {
    let error = resolve("no-such-host.invalid:7177").unwrap_err();
    assert!(matches!(error, ConnectError::Unresolved { .. }), "{error}");
    assert!(error.may_pass() && !error.is_usage());
}

fn addrs(texts: &[&str]) -> Vec<SocketAddr> {
    texts.iter().map(|text| addr(text)).collect()
}

#[test]
fn each_address_of_a_name_has_its_turn() {
    let both = addrs(&["[::1]:7", "127.0.0.1:7"]);
    let one = |addr: &SocketAddr| vec![*addr];
    let alone = choices(std::slice::from_ref(&both));
    assert_eq!(alone, both.iter().map(one).collect::<Vec<_>>());
    // Two names with addresses of both IP versions, in different orders.
    let other = addrs(&["127.0.0.1:9", "[::1]:9"]);
    let pairs = vec![addrs(&["[::1]:7", "[::1]:9"]), addrs(&["127.0.0.1:7", "127.0.0.1:9"])];
    assert_eq!(choices(&[both, other]), pairs);
    // If one name has addresses of only one IP version, both names use that version. The name with
    // fewer addresses repeats its last one.
    let more = addrs(&["[::1]:7", "192.0.2.1:7", "192.0.2.2:7"]);
    let fixed = addrs(&["198.51.100.1:7"]);
    let two = |ip: &str| addrs(&[ip, "198.51.100.1:7"]);
    assert_eq!(choices(&[more, fixed]), [two("192.0.2.1:7"), two("192.0.2.2:7")]);
    // Without a common IP version, the only combination serves to report the error.
    let none = [addrs(&["[::1]:7"]), addrs(&["127.0.0.1:7"])];
    assert_eq!(choices(&none), [addrs(&["[::1]:7", "127.0.0.1:7"])]);
}

#[test]
fn a_name_has_a_way_for_each_address_that_this_host_can_call() {
    let hosts = ["localhost:7".to_owned()];
    let ways = find_ways(&hosts, None).unwrap();
    let each = resolve(&hosts[0]).unwrap();
    let called: Vec<_> = ways.iter().flatten().map(|route| route.to).collect();
    assert!(!called.is_empty() && called.iter().all(|to| each.contains(to)), "{called:?}");
    assert!(ways.iter().all(|routes| routes.len() == 1));
}

#[test]
fn the_smallest_mtu_applies_and_none_may_be_asked_for_above_it() {
    let through = |mtu| {
        let interface = Some(Interface { mtu, ..interface("eth0", &["192.0.2.9"]) });
        Route { interface, ..route("192.0.2.1:7", "192.0.2.9:0") }
    };
    let both = [through(9000), through(1500)];
    assert_eq!(mtu_of(&both, None).unwrap(), 1500);
    assert_eq!(mtu_of(&both, Some(1400)).unwrap(), 1400);
    assert_eq!(mtu_of(&both[..1], Some(9000)).unwrap(), 9000);
    let error = mtu_of(&both, Some(9000)).unwrap_err();
    assert!(matches!(error, ConnectError::Arguments { options: ["mtu"], .. }), "{error}");
}
