use std::net::SocketAddr;
use std::path::PathBuf;

use quinn::ConnectionError;
use racksum_proto::time::Span;

use super::*;
use crate::quic::{Credentials, Identity, connect, not_connected, server};

/// Temporary folder of files, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("racksum-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, pem: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, pem).unwrap();
        path
    }

    /// Creates an authority whose file lies in this folder.
    fn authority(&self, name: &str) -> Authority {
        let path = self.write(&format!("{name}.pem"), &Authority::create(name, 10).unwrap());
        Authority::load(&path).unwrap()
    }

    fn credentials(&self, authority: &Authority, name: &str, role: Role) -> Credentials {
        let (pem, _) = authority.issue(&Subject { name, role, days: None }).unwrap();
        Credentials::new(Some(&self.write(name, &pem)), false).unwrap()
    }

    fn expired(&self, authority: &Authority, name: &str, role: Role) -> Credentials {
        let past = OffsetDateTime::now_utc() - Duration::minutes(1);
        let pem = authority.issue_until(&Subject { name, role, days: None }, past).unwrap();
        Credentials::new(Some(&self.write(name, &pem)), false).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Calls a server; returns the peer that the server saw, or the error of each side.
async fn call(
    served: &Credentials,
    caller: &Credentials,
) -> (Result<Certificate, ConnectionError>, Result<(), String>) {
    let endpoint = server("127.0.0.1:0".parse().unwrap(), served).unwrap();
    let to: SocketAddr = endpoint.local_addr().unwrap();
    let accept = tokio::spawn(async move {
        let connection = endpoint.accept().await.unwrap().await?;
        let peer = Certificate::of_peer(&connection).unwrap();
        let (mut send, _recv) = connection.accept_bi().await?;
        send.write_all(b"welcome").await.unwrap();
        send.finish().unwrap();
        connection.closed().await;
        Ok(peer)
    });
    let called = async {
        let connection =
            connect(to, caller, Span::from_secs(5)).await.map_err(|e| e.to_string())?;
        // The server may still reject the certificate it was shown.
        let failure = |cause| not_connected(to, cause).to_string();
        let (mut send, mut recv) = connection.quic().open_bi().await.map_err(failure)?;
        send.write_all(b"hello").await.ok();
        let answer = recv.read_to_end(100).await;
        match answer {
            Ok(_) => connection.close("done").await,
            Err(_) => return Err(failure(connection.quic().closed().await)),
        }
        Ok(())
    };
    let result = called.await;
    (accept.await.unwrap(), result)
}

#[tokio::test]
async fn nodes_of_one_authority_believe_each_other() {
    let folder = Folder::new("believe");
    let authority = folder.authority("rack");
    let served = folder.credentials(&authority, "agg-1", Role::Aggregator);
    let roles = [Role::Worker, Role::Aggregator, Role::Operator];
    for (name, role) in ["node-7", "agg-2", "ops"].into_iter().zip(roles) {
        let (peer, result) = call(&served, &folder.credentials(&authority, name, role)).await;
        assert_eq!(result, Ok(()));
        let peer = peer.unwrap();
        assert_eq!((&*peer.name, &*peer.issuer, peer.role), (name, "rack", role));
        assert!(peer.valid && peer.fingerprint.len() == 64);
    }
}

#[tokio::test]
async fn who_is_of_another_authority_is_refused_with_the_reason_on_both_sides() {
    let folder = Folder::new("stranger");
    let [ours, theirs] = ["rack", "elsewhere"].map(|name| folder.authority(name));
    let served = folder.credentials(&ours, "agg", Role::Aggregator);
    let stranger = folder.credentials(&theirs, "node", Role::Worker);
    // The caller detects the mismatch first, because the server shows its certificate first.
    let (peer, error) = call(&served, &stranger).await;
    let error = error.unwrap_err();
    assert!(error.contains("it was issued by another authority"), "{error}");
    assert!(peer.unwrap_err().to_string().contains("certificate"), "the server receives the alert");
    // The server rejects a caller that accepts every certificate but has no identity.
    let (peer, error) = call(&served, &Credentials::new(None, false).unwrap()).await;
    let error = error.unwrap_err();
    assert!(error.contains("rejected this identity: its certificate is self-signed"), "{error}");
    let logged = log_of(peer);
    assert!(logged.contains("has no identity, only a self-signed certificate"), "{logged}");
    // A server without an identity is not reported as an aggregator of another authority.
    let (_, error) = call(&Credentials::new(None, false).unwrap(), &stranger).await;
    let error = error.unwrap_err();
    assert!(error.contains("has no identity, only a self-signed certificate"), "{error}");
}

/// Returns the server's log text for a caller it rejected.
fn log_of(peer: Result<Certificate, ConnectionError>) -> String {
    not_connected("192.0.2.1:7".parse().unwrap(), peer.unwrap_err()).to_string()
}

#[tokio::test]
async fn a_certificate_without_the_name_of_aggregators_serves_nobody_and_both_sides_say_why() {
    let folder = Folder::new("name");
    let authority = folder.authority("rack");
    let node = folder.credentials(&authority, "node", Role::Worker);
    let mut params = params("agg", in_days(1)).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    for names in [vec![], vec!["agg.example".to_owned(), "racksum.example".to_owned()]] {
        params.subject_alt_names = CertificateParams::new(names).unwrap().subject_alt_names;
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &authority.issuer).unwrap();
        let of_authority = std::fs::read_to_string(folder.0.join("rack.pem")).unwrap();
        let (of_authority, _) = of_authority.split_once("-----BEGIN PRIVATE").unwrap();
        let pem = certificate.pem() + &key.serialize_pem() + of_authority;
        let path = folder.write("agg", &pem);
        let why = Credentials::of_aggregator(Some(&path), false).unwrap_err().to_string();
        assert!(why.contains("lacks subjectAltName=DNS:racksum, "), "{why}");
        let (peer, error) = call(&Credentials::new(Some(&path), false).unwrap(), &node).await;
        let (error, logged) = (error.unwrap_err(), log_of(peer));
        assert!(error.contains(": it is damaged, or lacks subjectAltName=DNS:racksum"), "{error}");
        assert!(
            logged.contains("its certificate is damaged, or lacks subjectAltName=DNS:racksum"),
            "{logged}"
        );
    }
}

#[tokio::test]
async fn an_expired_certificate_is_refused_with_the_reason_on_both_sides() {
    let folder = Folder::new("expired");
    let authority = folder.authority("rack");
    let served = folder.credentials(&authority, "agg", Role::Aggregator);
    let (peer, error) = call(&served, &folder.expired(&authority, "node", Role::Worker)).await;
    let error = error.unwrap_err();
    assert!(error.contains("rejected this identity: its certificate has expired"), "{error}");
    assert!(peer.unwrap_err().to_string().contains("expired"));
    let late = folder.expired(&authority, "agg-late", Role::Aggregator);
    let node = folder.credentials(&authority, "node-2", Role::Worker);
    let (_, error) = call(&late, &node).await;
    let error = error.unwrap_err();
    assert!(error.contains(": it has expired"), "{error}");
}

#[tokio::test]
async fn neither_a_worker_nor_an_operator_can_pass_for_an_aggregator() {
    let folder = Folder::new("role");
    let authority = folder.authority("rack");
    let caller = folder.credentials(&authority, "node-2", Role::Worker);
    for role in [Role::Worker, Role::Operator] {
        let false_server = folder.credentials(&authority, "node", role);
        let (_, error) = call(&false_server, &caller).await;
        let error = error.unwrap_err();
        assert!(error.contains(": it is for another role"), "{error}");
        let why = Credentials::of_aggregator(Some(&folder.0.join("node")), false).unwrap_err();
        let wrong = format!(
            "has role {role}, but role aggregator is needed; issue one with `racksum identity \
             issue NAME --role aggregator`"
        );
        assert!(why.to_string().contains(&wrong), "{why}");
    }
}

/// Returns the DER of the certificate that the authority issues for a role.
fn issued(authority: &Authority, role: Role) -> CertificateDer<'static> {
    let (pem, _) = authority.issue(&Subject { name: "ops", role, days: None }).unwrap();
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

#[test]
fn the_usages_of_each_role_have_their_bytes() {
    const CALLS: &[u8] = b"\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x02";
    const SERVES: &[u8] = b"\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x01";
    const OPERATES: &[u8] = b"\x06\x14\x69\x81\xd3\x8c\xd0\xca\x86\x88\xea\xa0\xa7\xac\xc6\x9d\xd1\
        \xe4\xdd\xce\xee\x11";
    let authority = Folder::new("usages").authority("rack");
    for (role, len, usages) in [
        (Role::Worker, 10, CALLS.to_vec()),
        (Role::Aggregator, 20, [CALLS, SERVES].concat()),
        (Role::Operator, 32, [CALLS, OPERATES].concat()),
    ] {
        // The identifier of the extension, and its content as an octet string.
        let extension = [b"\x06\x03\x55\x1d\x25\x04", &[len + 2, 0x30, len][..], &usages].concat();
        let der = issued(&authority, role);
        assert!(der.windows(extension.len()).any(|bytes| bytes == extension), "{role}: {der:x?}");
        assert_eq!(Certificate::parse(&der).unwrap().role, role);
    }
}

/// Returns a certificate of the authority with these extended key usages, if any, and the name that
/// callers require of an aggregator.
fn with_usages(authority: &Authority, name: &str, usages: &[&[u8]]) -> CertificateDer<'static> {
    let mut params = params("node", in_days(1)).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.subject_alt_names = vec![rcgen::SanType::DnsName(NAME.try_into().unwrap())];
    if !usages.is_empty() {
        let purposes: Vec<u8> = usages.iter().flat_map(|it| der(0x06, it)).collect();
        let usages = CustomExtension::from_oid_content(&[2, 5, 29, 37], der(0x30, &purposes));
        params.custom_extensions = vec![usages];
    }
    let key = KeyPair::generate().unwrap();
    params.signed_by(&key, &authority.issuer).unwrap().der().clone()
}

const CLIENT: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 2];
const SERVER: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 1];

#[test]
fn a_certificate_with_the_roles_of_a_server_and_of_an_operator_is_refused() {
    let authority = Folder::new("both").authority("rack");
    let why = Certificate::parse(&with_usages(&authority, "both", &[SERVER, OPERATOR]));
    let why = why.unwrap_err();
    assert!(why.starts_with("the certificate has the roles aggregator and operator"), "{why}");
}

#[test]
fn nobody_passes_with_a_certificate_whose_role_or_name_cannot_be_read() {
    let folder = Folder::new("unread");
    let authority = folder.authority("rack");
    let judge = folder.credentials(&authority, "agg", Role::Aggregator);
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let of_clients = judge.judge_of_clients(provider.clone()).unwrap();
    let of_servers = judge.judge_of_servers(provider).unwrap();
    let now = rustls::pki_types::UnixTime::now();
    let server = rustls::pki_types::ServerName::try_from(NAME).unwrap();
    for (name, usages, as_client, as_server) in [
        ("worker", &[CLIENT][..], true, false),
        ("agg", &[CLIENT, SERVER], true, true),
        ("ops", &[CLIENT, OPERATOR], true, false),
        // Without usages, the certificate is a worker's, although TLS allows it everything.
        ("any", &[], true, false),
        ("both", &[CLIENT, SERVER, OPERATOR], false, false),
        ("agg\u{7}", &[CLIENT, SERVER], false, false),
    ] {
        let shown = with_usages(&authority, name, usages);
        let judged = of_clients.verify_client_cert(&shown, &[], now);
        assert_eq!(judged.is_ok(), as_client, "{name:?}: {judged:?}");
        let judged = of_servers.verify_server_cert(&shown, &[], &server, &[], now);
        assert_eq!(judged.is_ok(), as_server, "{name:?}: {judged:?}");
    }
}

#[test]
fn names_that_are_no_plain_names_are_refused() {
    let authority = Folder::new("names").authority("rack");
    let issue = |name| authority.issue(&Subject { name, role: Role::Worker, days: None });
    let long = "x".repeat(65);
    for name in ["", ".hidden", "../up", "a b", "a/b", "-flag", "nöde", &long] {
        let error = issue(name).unwrap_err().to_string();
        assert!(error.contains("is not a valid name; use 1 to 64"), "{error}");
    }
    for name in ["n", "node-7.rack_2", &long[1..]] {
        assert!(issue(name).is_ok(), "{name}");
    }
}

#[test]
fn no_identity_outlives_its_authority() {
    let folder = Folder::new("outlives");
    let authority = folder.authority("rack");
    let until = rfc3339(authority.not_after.unix_timestamp());
    let issue = |days| authority.issue(&Subject { name: "node", role: Role::Worker, days });
    let error = issue(Some(11)).unwrap_err();
    let why = format!("11 days exceed the life of the authority, which expires at {until}; ");
    assert!(error.is_usage() && error.to_string().contains(&why), "{error}");
    // The authority's own number of days is allowed, and so is the default.
    for days in [Some(10), None] {
        let (pem, not_after) = issue(days).unwrap();
        assert_eq!(not_after, until);
        let certificates = Certificate::all_of(&folder.write("node", &pem)).unwrap();
        assert_eq!(certificates[0].not_after, until);
    }
    assert!(issue(Some(1)).unwrap().1 < until);
    let path = folder.write("old.pem", &Authority::create("old", 0).unwrap());
    let old = Authority::load(&path).unwrap();
    let why = old.issue(&Subject { name: "node", role: Role::Worker, days: None }).unwrap_err();
    assert!(why.to_string().contains("the authority expired at "), "{why}");
}

#[test]
fn files_that_hold_no_identity_say_what_they_lack() {
    let folder = Folder::new("files");
    let authority = folder.authority("rack");
    let whole = authority.issue(&Subject { name: "n", role: Role::Worker, days: None }).unwrap();
    let (whole, _) = whole;
    let key = whole.find("-----BEGIN PRIVATE KEY").unwrap();
    let behind = whole.rfind("-----BEGIN CERTIFICATE").unwrap();
    let error_of = |name: &str, pem: &str| {
        let path = folder.write(name, pem);
        Credentials::new(Some(&path), false).unwrap_err().to_string()
    };
    let other = Authority::create("own", 1).unwrap();
    let both = format!("{whole}{other}");
    for (pem, why) in [
        ("", "holds no certificate"),
        (&whole[..key], "holds no private key"),
        (&whole[..behind], "lacks the authority's certificate"),
        (&other, "the file belongs to an authority"),
        (&both, "several private keys"),
        ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", ""),
    ] {
        let error = error_of("broken.pem", pem);
        assert!(error.contains("broken.pem: ") && error.contains(why), "{error}");
    }
    let error = error_of("first.pem", &(FIRST_VERSION.to_owned() + &whole[key..]));
    assert!(error.contains("X.509 version 1, without extensions"), "{error}");
    let missing = folder.0.join("missing.pem");
    let error = Credentials::new(Some(&missing), false).unwrap_err().to_string();
    assert!(
        error.starts_with("identity ") && error.contains("missing.pem: No such file"),
        "{error}"
    );
    let node = folder.write("node.pem", &whole);
    let error = Authority::load(&node).unwrap_err().to_string();
    assert!(error.contains("\"n\" has role worker, not authority"), "{error}");
    let error = Credentials::new(Some(&node), true).unwrap_err();
    assert!(matches!(error, NetError::InsecureIdentity), "{error}");
}

#[test]
fn an_identity_says_whether_the_authority_that_issued_it_is_in_its_file() {
    let folder = Folder::new("issuer");
    let authority = folder.authority("rack");
    let own = folder.credentials(&authority, "n", Role::Worker);
    assert!(own.identity.is_of_its_authorities());
    let (pem, _) = authority.issue(&Subject { name: "n", role: Role::Worker, days: None }).unwrap();
    let other = Authority::create("other", 1).unwrap();
    let behind = pem.rfind("-----BEGIN CERTIFICATE").unwrap();
    let end = other.find("-----BEGIN PRIVATE").unwrap();
    let foreign = folder.write("foreign.pem", &(pem[..behind].to_owned() + &other[..end]));
    let foreign = Credentials::new(Some(&foreign), false).unwrap();
    assert!(!foreign.identity.is_of_its_authorities());
}

/// Certificate made with `openssl x509 -req`, without extensions.
const FIRST_VERSION: &str = "-----BEGIN CERTIFICATE-----
MIIBGjCBwQIUJLruomap70mOunenvm0JMnKFcPYwCgYIKoZIzj0EAwIwDzENMAsG
A1UEAwwEbm9kZTAgFw0yNjExMjYwMTA3NDJaGA8yMTI2MTEwMjAxMDc0MlowDzEN
MAsGA1UEAwwEbm9kZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABApHAV+s4wJ9
To2n4J4uFXN6k6Nu+ui2uo79aT4tfQUSrZGNkDU9fveW85fCFTObOTnLvo30Eboz
Em25XGTkyXkwCgYIKoZIzj0EAwIDSAAwRQIgGmZ7j2tV/i2Ti+BtlgdMc0DLBps/
1isVmGsVnIb1lZkCIQDXkH8i2mnpv28AOXA7eZT7+hOeBdMAEXXCP98PJ7VjRA==
-----END CERTIFICATE-----
";

#[test]
fn a_damaged_file_is_refused_with_one_sentence_and_none_of_its_bytes() {
    let folder = Folder::new("damaged");
    let (one, two) = (folder.authority("one"), folder.authority("two"));
    let subject = Subject { name: "node", role: Role::Worker, days: None };
    let issue = |by: &Authority| by.issue(&subject).unwrap().0;
    let (whole, other) = (issue(&one), issue(&two));
    let sections = |pem: &str| -> Vec<String> {
        pem.split_inclusive("-----\n")
            .collect::<Vec<_>>()
            .chunks(2)
            .map(|two| two.concat())
            .collect()
    };
    let (own, others) = (sections(&whole), sections(&other));
    let no_der = |label: &str| format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n");
    let mut damaged: Vec<String> = vec![
        "garbage".into(),
        whole.replacen("-----BEGIN CERTIFICATE-----", "-----BEGIN CERTIFICATE--", 1),
        whole.replacen("MII", "M*I", 1),
        whole.replace("PRIVATE KEY", "SECRET"),
        no_der("CERTIFICATE") + &own[1] + &own[2],
        own[0].clone() + &no_der("PRIVATE KEY") + &own[2],
        own[0].clone() + &own[1] + &no_der("CERTIFICATE"),
        own[0].clone() + &others[1] + &own[2],
    ];
    // A half-written file may end anywhere.
    let cuts = (0..whole.len() - 1).step_by(97);
    damaged.extend(cuts.map(|at| whole[..at].to_owned()));
    for pem in damaged {
        let path = folder.write("damaged.pem", &pem);
        let error = Identity::load(&path).unwrap_err();
        let text = error.to_string();
        assert!(error.is_usage(), "{text}");
        assert!(text.starts_with(&format!("identity {}: ", path.display())), "{text}");
        assert!(!text.contains('[') && !text.contains(", 4") && text.len() < 250, "{text}");
        drop(Certificate::all_of(&path).map_err(|error| assert!(!error.to_string().contains('['))));
        drop(Authority::load(&path).map_err(|error| assert!(!error.to_string().contains('['))));
    }
}

#[test]
fn a_pipe_is_no_identity_and_nobody_waits_for_its_writer() {
    let folder = Folder::new("pipe");
    let path = folder.0.join("pipe.pem");
    let pipe = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &path, pipe, rustix::fs::Mode::RWXU, 0).unwrap();
    let error = Identity::load(&path).unwrap_err();
    let NetError::IdentityFile { what, path: named, why } = error else { panic!("{error}") };
    assert_eq!((what, named), (FileKind::Identity, path));
    assert!(why.starts_with("not a regular file"), "{why}");
}

#[test]
fn credentials_that_know_the_authorities_of_others_believe_like_them() {
    let folder = Folder::new("believe");
    let [one, other] = ["one", "other"].map(|name| folder.authority(name));
    let own = folder.credentials(&one, "agg-1", Role::Aggregator);
    let renewed = folder.credentials(&one, "agg-2", Role::Aggregator);
    let foreign = folder.credentials(&other, "agg-3", Role::Aggregator);
    let [none, neither] = [(); 2].map(|()| Credentials::new(None, false).unwrap());
    assert!(renewed.accept_all_of(&own) && neither.accept_all_of(&none));
    assert!(!foreign.accept_all_of(&own) && !own.accept_all_of(&none));
}

#[test]
fn an_authority_whose_key_is_another_s_issues_nothing() {
    let folder = Folder::new("other-key");
    let [one, two] = ["one", "two"].map(|name| Authority::create(name, 10).unwrap());
    let key_at = |pem: &str| pem.find("-----BEGIN PRIVATE").unwrap();
    let mixed = one[..key_at(&one)].to_owned() + &two[key_at(&two)..];
    let why = Authority::load(&folder.write("mixed.pem", &mixed)).unwrap_err().to_string();
    assert!(why.contains("belongs to another certificate"), "{why}");
}
