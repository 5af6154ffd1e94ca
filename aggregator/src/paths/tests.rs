use std::sync::Mutex;

use racksum_net::quic::{Credentials, server};

use super::*;
use crate::config::{Config, Fanout};
use crate::parent_session::call;
use crate::registry::tests::{join, registry, wish};

#[test]
fn a_life_that_ends_while_its_path_is_proven_hangs_up_and_has_not_joined() {
    let proven = async {
        let credentials = Credentials::new(None, false).unwrap();
        let parent = server("127.0.0.1:0".parse().unwrap(), &credentials).unwrap();
        let to = parent.local_addr().unwrap().to_string();
        let mut registry = registry(Fanout::Unicast, 0);
        registry.reconfigure(Config { parent: Some(to), ..Config::default() });
        let registry = Arc::new(Mutex::new(registry));
        let (seat, _, _inbox) = join(&mut lock(&registry), wish("job", 0, 2)).unwrap();
        let called = tokio::spawn(call(Arc::clone(&registry), seat));
        let connection = parent.accept().await.unwrap().await.unwrap();
        let (_send, mut recv) = connection.accept_bi().await.unwrap();
        let message = frames::recv::<FromWorker>(&mut recv).await.unwrap();
        assert!(matches!(message, Some(FromWorker::Prove { .. })), "{message:?}");
        // End the job while the task waits for the parent's answer.
        lock(&registry).stop();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(called.is_finished(), "the task does not wait for the parent");
        let more = frames::recv::<FromWorker>(&mut recv).await;
        assert!(!matches!(more, Ok(Some(_))), "{more:?}");
        connection.closed().await;
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(proven);
}
