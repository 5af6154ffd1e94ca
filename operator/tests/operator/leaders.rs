//! Leader election by a Lease.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use racksum_operator::lease::{Election, Times};
use serde_json::json;

use crate::standin::{Kind, Refusal, Server};

/// The only Lease that the operator may read and write.
const LEASE: &str = "racksum-operator";

fn election(client: &Client, identity: &str) -> Election {
    let mut election = Election::new(client, "ml", LEASE, identity);
    election.times = Times {
        duration: Duration::from_secs(4),
        deadline: Duration::from_secs(3),
        retry: Duration::from_millis(50),
    };
    election
}

async fn holder(client: &Client) -> (String, i32) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), "ml");
    let spec = leases.get(LEASE).await.unwrap().spec.unwrap();
    (spec.holder_identity.unwrap_or_default(), spec.lease_transitions.unwrap_or(0))
}

#[tokio::test]
async fn of_two_replicas_one_leads_and_the_other_follows_a_release() {
    let server = Server::start().await;
    let client = server.client();
    let (one, other) = (election(&client, "one"), election(&client, "other"));
    one.acquire().await;
    let waiting = tokio::spawn(async move {
        other.acquire().await;
        other
    });
    tokio::select! {
        lost = one.hold() => panic!("{lost:?}"),
        () = tokio::time::sleep(Duration::from_secs(5)) => {}
    }
    assert!(!waiting.is_finished(), "the lease of a living leader was taken");
    assert_eq!(holder(&client).await, ("one".into(), 1));
    one.release().await.unwrap();
    let other = waiting.await.unwrap();
    assert_eq!(holder(&client).await, ("other".into(), 2));
    // The former leader cannot release the lease of its successor.
    one.release().await.unwrap();
    assert_eq!(holder(&client).await.0, "other");
    drop(other);
}

#[tokio::test]
async fn a_silent_leader_is_followed_and_stops() {
    let server = Server::start().await;
    let client = server.client();
    let (one, other) = (election(&client, "one"), election(&client, "other"));
    one.acquire().await;
    other.acquire().await;
    assert_eq!(holder(&client).await, ("other".into(), 2));
    let lost = one.hold().await;
    assert!(lost.was_taken, "{lost:?}");
    assert_eq!(lost.message, "another replica holds lease racksum-operator");
}

#[tokio::test]
async fn a_leader_that_cannot_renew_stops_in_time() {
    let server = Server::start().await;
    let one = election(&server.client(), "one");
    one.acquire().await;
    let refusal = |method, part: &str| Refusal {
        method,
        part: part.into(),
        times: u32::MAX,
        code: 500,
        message: "etcdserver: leader changed".into(),
    };
    server.refuse(refusal("PUT", "/leases/"));
    let why = one.hold().await.message;
    assert!(why.starts_with("lease racksum-operator was not renewed for 3 s"), "{why}");
    server.faults(|faults| faults.is_gone = true);
    let lost = one.hold().await;
    assert!(!lost.was_taken, "{lost:?}");
}

#[tokio::test]
async fn replicas_that_race_for_a_new_lease_agree() {
    let server = Server::start().await;
    let client = server.client();
    let acquired =
        (0..8).map(|number| {
            let election = election(&client, &format!("replica-{number}"));
            async move {
                tokio::time::timeout(Duration::from_millis(500), election.acquire()).await.is_ok()
            }
        });
    let leaders = futures::future::join_all(acquired).await;
    assert_eq!(leaders.into_iter().filter(|leads| *leads).count(), 1);
}

#[tokio::test]
async fn a_lease_without_a_holder_is_free() {
    let server = Server::start().await;
    let client = server.client();
    let lease = json!({"metadata": {"name": LEASE}, "spec": {}});
    server.store().create(Kind::Lease, "ml", lease).unwrap();
    election(&client, "one").acquire().await;
    assert_eq!(holder(&client).await.0, "one");
}
