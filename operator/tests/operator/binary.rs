//! The program as it runs in a pod: its flags, its signals, and two replicas of it.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use racksum_operator::crd::definition;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::standin::{Kind, OPERATOR, Server, Store};
use crate::world::{NAMESPACE, World, group, worker};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_racksum-operator"));
    command.kill_on_drop(true).stderr(Stdio::null()).env_remove("KUBERNETES_SERVICE_HOST");
    command
}

/// Writes a configuration of kubectl that leads to a stand-in.
fn configured(folder: &Path, server: &Server) -> std::path::PathBuf {
    let path = folder.join("config");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{
            "name": "c", "context": {"cluster": "k", "user": "u", "namespace": NAMESPACE},
        }],
        "clusters": [{"name": "k", "cluster": {"server": server.url()}}],
        "users": [{"name": "u", "user": {"token": OPERATOR}}],
    });
    std::fs::write(&path, text.to_string()).unwrap();
    path
}

fn replica(config: &Path, identity: &str) -> Child {
    let mut command = program();
    command.env("KUBECONFIG", config).args(["run", "--replica", identity]);
    command.args(["--lease-duration", "2", "--health", "127.0.0.1:0"]).spawn().unwrap()
}

async fn output(arguments: &[&str]) -> Output {
    let mut command = program();
    command.env("KUBECONFIG", "/nowhere").stderr(Stdio::piped());
    command.args(arguments).output().await.unwrap()
}

fn leader(store: &Store) -> Option<String> {
    let lease = store.get(Kind::Lease, NAMESPACE, "racksum-operator")?;
    lease["spec"]["holderIdentity"].as_str().map(ToOwned::to_owned)
}

#[tokio::test]
async fn a_replica_takes_over_when_the_leader_is_killed_and_another_when_it_is_stopped() {
    let world = World::start().await;
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), &world.server);
    let mut one = replica(&config, "one");
    world.until("one leads", |store| (leader(store)? == "one").then_some(())).await;
    let mut two = replica(&config, "two");
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.until_condition("WorkersReady", "WaitingForWorkers").await;
    one.kill().await.unwrap();
    world.until("two leads", |store| (leader(store)? == "two").then_some(())).await;
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
    // SIGTERM releases the lease at once.
    let id = two.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().await.unwrap().success());
    assert_eq!(two.wait().await.unwrap().code(), Some(0));
    assert_eq!(leader(&world.server.store_quietly()).as_deref(), Some(""));
    let _three = replica(&config, "three");
    world.until("three leads", |store| (leader(store)? == "three").then_some(())).await;
}

#[tokio::test]
async fn a_leader_that_lost_the_server_leads_again_and_tells() {
    let world = World::start().await;
    let folder = tempfile::tempdir().unwrap();
    let config = configured(folder.path(), &world.server);
    let _one = replica(&config, "one");
    world.create(Kind::Group, group("FollowWorkers", 1, 1));
    world.until_condition("WorkersReady", "WaitingForWorkers").await;
    let told = |store: &Store| {
        store.list(Kind::Event).any(|event| event["reason"] == "Unreachable").then_some(())
    };
    // On a busy machine, the leader may not notice a short outage, so there are several.
    for _ in 0..20 {
        world.server.faults(|faults| faults.is_gone = true);
        tokio::time::sleep(Duration::from_secs(2)).await;
        world.server.faults(|faults| faults.is_gone = false);
        if tokio::time::timeout(Duration::from_secs(5), world.until("told", told)).await.is_ok() {
            break;
        }
    }
    let note = world.until_event("Unreachable").await;
    assert!(note.starts_with("lease racksum-operator was not renewed"), "{note}");
    world.create(Kind::Pod, worker(0));
    world.until_condition("Ready", "AggregatorsReady").await;
}

#[tokio::test]
async fn without_an_api_server_the_message_says_what_to_do() {
    let failed = output(&["run"]).await;
    let text = String::from_utf8(failed.stderr).unwrap();
    assert!(text.starts_with("racksum-operator: no access to the API server: "), "{text}");
    assert!(text.ends_with("set KUBECONFIG\n"), "{text}");
    assert_eq!(failed.status.code(), Some(3));
}

#[tokio::test]
async fn the_checked_in_definition_is_that_of_the_type() {
    let printed = String::from_utf8(output(&["crd"]).await.stdout).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/operator/crd.yaml");
    let kept = std::fs::read_to_string(&path).unwrap();
    let command = "cargo run -p racksum-operator -- crd > deploy/kubernetes/operator/crd.yaml";
    assert!(kept == printed, "the definition has changed; run `{command}`");
    let read: Value = serde_saphyr::from_str(&kept).unwrap();
    assert_eq!(read, serde_json::to_value(definition()).unwrap());
}
