use std::time::Duration;

use racksum_net::quic::connect;
use racksum_proto::time::Span;

use super::*;
use crate::shard::Command;
use crate::start::any_number;

fn config() -> Config {
    Config { port: 0, pool_mib: 1, ..Config::default() }
}

#[test]
fn a_shard_that_panics_ends_the_aggregator_and_its_ranks_are_told() {
    let aggregator = Aggregator::start(Config { shards: 2, ..config() }).unwrap();
    assert_eq!(aggregator.failure(), None);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let why = "the thread shard-1 panicked, which is a bug in racksum; all jobs have ended";
    let ended = runtime.block_on(async {
        let credentials = Credentials::new(None, false).unwrap();
        let patience = Span::from_secs(100);
        let rank = connect(aggregator.addr(), &credentials, patience).await.unwrap();
        // The close reason arrives only once the aggregator has seen the end of the handshake.
        while rank.quic().stats().frame_rx.handshake_done == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        lock(&aggregator.registry).shards()[1].send(Command::Panic);
        let both = async { (aggregator.failed().await, rank.quic().closed().await) };
        tokio::time::timeout(Duration::from_secs(200), both).await.unwrap()
    });
    assert_eq!(ended.0, why);
    assert!(ended.1.to_string().contains("the aggregator failed"), "{}", ended.1);
    assert_eq!(aggregator.failure().as_deref(), Some(why));
}

#[test]
fn multicast_is_refused_where_it_cannot_be_and_passed_over_where_it_need_not() {
    let six = Config { bind: std::net::Ipv6Addr::LOCALHOST.into(), ..config() };
    let error = Aggregator::start(Config { fanout: Fanout::Multicast, ..six.clone() }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "--fanout multicast is not possible: cannot use lo for multicast: the interface does not \
         support multicast; choose another interface, or turn multicast off with `racksum \
         aggregator --fanout unicast`"
    );
    drop(Aggregator::start(Config { fanout: Fanout::Auto, ..six }).unwrap());
    drop(Aggregator::start(Config { fanout: Fanout::Multicast, ..config() }).unwrap());
}

#[test]
fn lives_of_an_aggregator_begin_their_jobs_at_numbers_of_their_own() {
    let numbers: BTreeSet<_> = (0..100).map(|_| any_number()).collect();
    assert!(numbers.len() > 90, "{numbers:?}");
}
