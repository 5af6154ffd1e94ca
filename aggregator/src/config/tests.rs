use super::*;

#[test]
fn a_file_overrides_what_it_names() {
    let config = Config::from_toml("shards = 3\nfanout = \"unicast\"").unwrap();
    assert_eq!((config.shards, config.fanout), (3, Fanout::Unicast));
    assert_eq!(config.pool_slots, Config::default().pool_slots);
}

#[test]
fn unknown_keys_and_bad_numbers_are_named() {
    let error_of = |text: &str| Config::from_toml(text).unwrap_err().to_string();
    let unknown = error_of("\nshrads = 3");
    assert!(unknown.starts_with("line 2: unknown field `shrads`, expected one of"), "{unknown}");
    assert!(error_of("insecure = \"x\"").starts_with("line 1: insecure: invalid type: string"));
    assert!(error_of("\n\nport = =").starts_with("line 3: "));
    let error = Config::from_toml("shards = 0").unwrap_err().to_string();
    assert_eq!(error, "line 1: shards must be from 1 to 64, not 0");
    let syntax = error_of("port = 1\nshards 3\n[x");
    assert!(syntax.starts_with("line 2: invalid TOML: ") && !syntax.contains('\n'), "{syntax}");
}

#[test]
fn the_last_shard_may_have_the_last_port() {
    let check = |port, shards| Config { port, shards, ..Config::default() }.validate();
    for shards in [1, 2, MAX_SHARDS] {
        let last = u16::MAX - u16::from(shards);
        assert_eq!(check(last, shards), Ok(()));
        let why = check(last + 1, shards).unwrap_err().to_string();
        assert_eq!(why, format!("port must be from 0 to {last}, not {}", last + 1));
    }
}

#[test]
fn rules_of_admission_are_read_and_need_an_identity() {
    let rules = "[[admit]]\nidentity = \"team-*\"\njobs = [\"a\", \"b-*\"]\n";
    let config = Config::from_toml(&format!("identity = \"agg.pem\"\n{rules}")).unwrap();
    let jobs = ["a", "b-*"].map(str::to_owned).to_vec();
    let expected = Admit { identity: "team-*".to_owned(), jobs, ..Admit::default() };
    assert_eq!(config.admit, [expected]);
    assert_eq!(config.validate(), Ok(()));
    // A file may have rules but no identity, because the command line may add one.
    let bare = Config::from_toml(rules).unwrap();
    assert_eq!(bare.validate(), Err(ConfigError::AdmitWithoutIdentity));
    let wrong = Config::from_toml("[[admit]]\nidentity = \"x\"\n").unwrap_err().to_string();
    assert!(wrong.contains("line 1: missing field `jobs`"), "{wrong}");
}

#[test]
fn a_key_that_names_nothing_is_refused_with_its_rule() {
    let error_of = |text: &str| Config::from_toml(text).unwrap_err().to_string();
    let second = |rule: &str| {
        error_of(&format!("[[admit]]\nidentity = \"a\"\njobs = [\"b\"]\n[[admit]]\n{rule}"))
    };
    for (rule, why) in [
        (
            "identity = \"\"\njobs = [\"a\"]",
            "line 5: identity of [[admit]] rule 2 must be a pattern",
        ),
        ("identity = \"a\"\njobs = []", "line 6: jobs of [[admit]] rule 2 must be a list"),
        (
            "identity = \"a\"\njobs = [\"b\", \"\"]",
            "line 6: a name in jobs of [[admit]] rule 2 must",
        ),
        (
            "identity = \"a\"\njobs = [\"b\"]\nmax_jobs = 0",
            "line 7: max_jobs of [[admit]] rule 2 must be from 1 to 1024, not 0",
        ),
    ] {
        assert!(second(rule).starts_with(why), "{}", second(rule));
    }
    assert_eq!(error_of("identity = \"\""), "line 1: identity must be a file path, not empty");
    assert!(error_of("status_socket = \"\"").starts_with("line 1: status_socket must be "));
}

#[test]
fn a_link_local_address_is_refused_with_the_reason() {
    for bind in ["fe80::1", "fe80::1%eth0"] {
        let why = Config::from_toml(&format!("bind = {bind:?}")).unwrap_err().to_string();
        let expected = "line 1: bind must not be a link-local address such as fe80::1; ";
        assert!(why.starts_with(expected), "{why}");
    }
    for bind in ["224.0.0.1", "ff15::1", "255.255.255.255", "127.255.255.255"] {
        let why = Config::from_toml(&format!("bind = {bind:?}")).unwrap_err().to_string();
        let expected = format!("line 1: bind: cannot serve at {bind}, which is a ");
        assert!(why.starts_with(&expected), "{why}");
    }
    for bind in ["0.0.0.0", "::"] {
        assert!(Config::from_toml(&format!("bind = {bind:?}")).is_ok());
    }
    for bind in ["fd00::1%eth0", "eth0", "127.0.0.1%lo"] {
        let why = Config::from_toml(&format!("bind = {bind:?}")).unwrap_err().to_string();
        let expected = format!("line 1: bind: {bind:?} is not an IP address; ");
        assert!(why.starts_with(&expected), "{why}");
    }
}

#[test]
fn a_value_that_its_type_cannot_hold_is_told_with_its_key_and_range() {
    let error_of = |text: &str| Config::from_toml(text).unwrap_err().to_string();
    let rule = "[[admit]]\nidentity = \"a\"\njobs = [\"b\"]\n";
    for (text, why) in [
        ("port = 70000", "line 1: port must be from 0 to 65534, not 70000"),
        ("shards = 300", "line 1: shards must be from 1 to 64, not 300"),
        ("shards = -1", "line 1: shards must be from 1 to 64, not -1"),
        ("shards = 2\nport = -1", "line 2: port must be from 0 to 65533, not -1"),
        ("max_ranks = 5000000000", "line 1: max_ranks must be from 1 to 262144, not 5000000000"),
        (
            "port = \"x\"",
            "line 1: port must be a whole number from 0 to 65534, but its type is string",
        ),
        (
            "shards = 1.5",
            "line 1: shards must be a whole number from 1 to 64, but its type is float",
        ),
        ("\n[admit]\nidentity = \"a\"", "line 2: the rules must be a list of tables;"),
        ("bind = \"\"", "line 1: bind: \"\" is not an IP address; "),
        (
            "bind = \"10.0.0.1:7\"",
            "line 1: bind: \"10.0.0.1:7\" includes a port; set bind to 10.0.0.1 and port to 7",
        ),
        ("\nbind = 1", "line 2: bind: invalid type: integer `1`, expected"),
        ("fanout = \"x\"", "line 1: fanout: unknown variant `x`, expected"),
        ("parent = 1", "line 1: parent: invalid type: integer `1`, expected"),
    ] {
        assert!(error_of(text).starts_with(why), "{text:?}: {}", error_of(text));
    }
    for (limit, why) in [
        ("share_percent = 300", "line 4: share_percent of [[admit]] rule 1 must be from 1 "),
        ("max_jobs = true", "line 4: max_jobs of [[admit]] rule 1 must be a whole "),
    ] {
        assert!(error_of(&format!("{rule}{limit}")).starts_with(why), "{limit}");
    }
}

#[test]
fn a_parent_is_one_other_aggregator() {
    let check = |parent: &str| {
        Config { parent: Some(parent.into()), ..Config::default() }.validate().is_ok()
    };
    for parent in ["root:7177", "10.0.0.1:7177", "[fd00::1]:7177", "127.0.0.1:7178"] {
        assert!(check(parent), "{parent}");
    }
    for parent in [
        "[::ffff:10.0.0.1]:7177",
        "",
        "root",
        ":7177",
        "root:x",
        "root:0",
        "a:1,b:1",
        "a:1+b:1",
        "127.0.0.1:7177",
        "0.0.0.0:7178",
        "[::]:7178",
        "224.0.0.1:7178",
    ] {
        assert!(!check(parent), "{parent}");
    }
}

#[test]
fn what_takes_a_restart_is_named_and_stays() {
    let running = Config { identity: Some("a.pem".into()), ..Config::default() };
    let wanted = Config {
        port: 1,
        shards: 2,
        max_jobs: 3,
        identity: Some("b.pem".into()),
        join_timeout_s: 4,
        ..running.clone()
    };
    assert_eq!(wanted.fixed_changes(&running), ["port", "shards"]);
    let expected = Config {
        max_jobs: 3,
        join_timeout_s: 4,
        identity: Some("b.pem".into()),
        ..running.clone()
    };
    assert_eq!(wanted.with_fixed_of(&running), expected);
    let without = Config { identity: None, ..running.clone() };
    assert_eq!(without.fixed_changes(&running), ["identity"]);
    assert_eq!(without.with_fixed_of(&running), running);
}

#[test]
fn every_key_that_stays_at_a_reload_is_named() {
    let running = Config::default();
    let of = |change: fn(&mut Config)| {
        let mut wanted = running.clone();
        change(&mut wanted);
        wanted
    };
    // A new key breaks compilation until it is listed here, as a reminder to add it to this test.
    let Config {
        bind: _,
        port: _,
        shards: _,
        pool_slots: _,
        pool_mib: _,
        max_jobs: _,
        max_ranks: _,
        join_timeout_s: _,
        fanout: _,
        identity: _,
        insecure: _,
        status_socket: _,
        data_auth: _,
        parent: _,
        admit: _,
    } = running;
    for (key, wanted) in [
        ("bind", of(|it| it.bind = Ipv6Addr::LOCALHOST.into())),
        ("port", of(|it| it.port = 1)),
        ("shards", of(|it| it.shards = 2)),
        ("pool_slots", of(|it| it.pool_slots = 8)),
        ("pool_mib", of(|it| it.pool_mib = 1)),
        ("max_jobs", of(|it| it.max_jobs = 1)),
        ("max_ranks", of(|it| it.max_ranks = 1)),
        ("join_timeout_s", of(|it| it.join_timeout_s = 1)),
        ("fanout", of(|it| it.fanout = Fanout::Unicast)),
        ("identity", of(|it| it.identity = Some("a.pem".into()))),
        ("insecure", of(|it| it.insecure = true)),
        ("status_socket", of(|it| it.status_socket = Some("a.sock".into()))),
        ("data_auth", of(|it| it.data_auth = Some(DataAuth::Aead))),
        ("parent", of(|it| it.parent = Some("a:1".into()))),
        ("admit", of(|it| it.admit = vec![Admit::default()])),
    ] {
        let named = wanted.fixed_changes(&running);
        let stays = wanted.clone().with_fixed_of(&running) == running;
        assert_eq!(named, if stays { vec![key] } else { vec![] }, "{key}");
        assert!(stays || wanted.clone().with_fixed_of(&running) == wanted, "{key}");
    }
}

#[test]
fn pools_that_no_memory_holds_are_refused() {
    let config = Config { shards: 2, pool_mib: 2000, ..Config::default() };
    assert_eq!(config.check_memory(4000), Ok(()));
    let error = config.check_memory(3999).unwrap_err().to_string();
    let expected = "the packet buffers of 2 shards, 2000 MiB each, exceed the 3999 MiB of memory \
                    of this host; lower --pool-mib or --shards";
    assert_eq!(error, expected);
    let mut small = Config { shards: 64, pool_mib: 16, ..Config::default() };
    assert!(small.fit_memory(512).is_err());
    assert!(host_mib().is_none_or(|mib| mib > 16), "{:?}", host_mib());
}

#[test]
fn pools_of_the_default_size_are_made_to_fit() {
    // Embedded aggregators use the default `pool_mib`, whatever their host and shard count.
    for (shards, host_mib, pool_mib) in [(1, 2048, 1024), (64, 1024, 8), (64, 1, 1), (1, 1024, 512)]
    {
        let mut config = Config { shards, ..Config::default() };
        let warned = config.fit_memory(host_mib).unwrap();
        assert_eq!(config.pool_mib, pool_mib);
        assert_eq!(warned.is_some(), pool_mib < 1024, "{warned:?}");
    }
}

#[test]
fn the_document_of_the_configuration_has_the_range_of_every_number_of_a_rule() {
    let document = include_str!("../../../docs/configuration.md");
    let (_, rules) = document.split_once("## `[[admit]]`").unwrap();
    for (key, min, max) in RULE_RANGES {
        let row = rules.lines().find(|row| row.starts_with(&format!("| `{key}` |"))).unwrap();
        assert!(row.contains(&format!(", {min} to {max}")), "{row}");
    }
}
