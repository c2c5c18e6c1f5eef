"""Which processors the rows of `make bench-cores` run on."""

from benchmarks.cores import layouts, nodes, numbers


def test_lists_of_processors() -> None:
    assert numbers("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert numbers("\n") == []


def test_threads_double_and_nodes_stay_whole() -> None:
    made = layouts([[0, 1, 2], [4, 5, 6]])
    assert [(one.name, one.engines, one.tp) for one in made] == [
        ("1 threads", ((0,),), 1),
        ("2 threads", ((0, 1),), 1),
        ("4 threads", ((0, 1, 2, 4),), 1),
        ("6 threads", ((0, 1, 2, 4, 5, 6),), 1),
        ("2 ranks", ((0, 1, 2, 4, 5, 6),), 2),
        ("2 engines", ((0, 1, 2), (4, 5, 6)), 1),
    ]
    assert [one.name for one in layouts([[3]])] == ["1 threads"]


def test_divided_nodes_are_this_machines_cores() -> None:
    whole = [cpu for node in nodes(1) for cpu in node]
    divided = nodes(2)
    assert [cpu for node in divided for cpu in node] == whole
    assert len(divided) == min(2, len(whole))
