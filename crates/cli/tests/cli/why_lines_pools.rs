//! `pinpool why --lines`: the pool of a line if several pools have the same limit, and damaged numbers.

use crate::tf_lines::inspected;

fn pools(text: &str) -> Vec<u64> {
    inspected(text).0.iter().map(|message| message["pool"].as_u64().unwrap()).collect()
}

/// Returns what a check prints after equal numbers of requests and returns.
fn after(get: u64, evicted: u64, eviction_rate: &str, rate: &str) -> String {
    let get = get.to_string();
    crate::tf_lines::after(&get, &get, &evicted.to_string(), eviction_rate, rate) + "\n"
}

#[test]
fn a_line_belongs_to_the_pool_with_the_nearest_counters() {
    let first = after(900_000, 1_000, "0.00111111", "0.00122222");
    let second = after(20_000, 1_000, "0.05", "0.055");
    let later = after(950_000, 2_000, "0.00210526", "0.00221053");
    let raise = "Raising pool_size_limit_ from 100 to 110\n";
    let text = format!("{first}{second}{later}{raise}");
    assert_eq!(pools(&text), [1, 2, 1, 1]);
    let (_, summary) = inspected(&text);
    assert_eq!((summary["pools"][0]["limit"].as_u64(), summary["pools"][1]["limit"].as_u64()), (Some(110), Some(100)));
    // The second pool continues as well.
    let second_later = after(40_000, 2_000, "0.05", "0.0525");
    assert_eq!(pools(&format!("{first}{second}{second_later}{later}")), [1, 2, 2, 1]);
    // Two checks of one pool never have the same evictions.
    assert_eq!(pools(&format!("{second}{first}{second_later}{later}")), [1, 2, 1, 2]);
    assert_eq!(pools(&format!("{first}{first}")), [1, 1]);
}

#[test]
fn a_raise_belongs_to_the_pool_of_the_preceding_check() {
    let (first, second) = (after(900_000, 1_000, "0.00111111", "0.00122222"), after(20_000, 1_000, "0.05", "0.055"));
    let later = after(950_000, 2_000, "0.00210526", "0.00221053");
    let raise = "Raising pool_size_limit_ from 100 to 110\n";
    assert_eq!(pools(&format!("{first}{second}{raise}")), [1, 2, 2]);
    assert_eq!(pools(&format!("{first}{second}{later}{raise}{raise}")), [1, 2, 1, 1, 2]);
    // A check of the other pool, which raises nothing, comes between the second pool's check and its raise.
    let quiet = after(1_960_000, 2_000, "0.00102041", "0.00107143");
    assert_eq!(pools(&format!("{first}{second}{quiet}{raise}")), [1, 2, 1, 2]);
}

#[test]
fn damaged_figures_count_as_cut() {
    let good = after(63_521, 1_000, "0.0157428", "0.0173171");
    for damaged in [
        // A progress bar was written over the end.
        "Raising pool_size_limit_ from 100 to 11012/100 [=>..]\n",
        "Raising pool_size_limit_ from 100 to 110/100 [=>..]\n",
        "Raising pool_size_limit_ from 100 to 11\n",
        "Raising pool_size_limit_ from 10 to 110\n",
        &after(71_532, 1_000, "0.0139798", "0.0143013e5"),
        &after(71_532, 1_000, "0.0139798e3", "0.0143013"),
        &after(71_532, 1_000, "0.0139798", "0."),
        &after(71_532, 1_000, "0.0139798", "0.014301312/100"),
        &after(71_532, 1_000, "-0.0139798", "0.0143013"),
    ] {
        let (messages, summary) = inspected(format!("{good}{damaged}"));
        assert_eq!((messages.len(), summary["cut"].as_u64()), (1, Some(1)), "{damaged}");
    }
    // Other text, or a full stop, directly after the last number.
    for whole in ["Raising pool_size_limit_ from 100 to 110.\n", "Raising pool_size_limit_ from 7 to 100I tensorflow\n"]
    {
        let (messages, summary) = inspected(format!("{good}{whole}"));
        assert_eq!((messages.len(), summary["cut"].as_u64()), (2, Some(0)), "{whole}");
    }
}
