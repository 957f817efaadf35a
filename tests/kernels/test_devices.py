"""Which GPU a process takes."""

from etude.kernels import nth_gpu


def test_processes_take_the_visible_gpus_in_turn() -> None:
    assert [nth_gpu(None, 3, number) for number in range(5)] == ["0", "1", "2", "0", "1"]
    assert [nth_gpu("4,GPU-8f,7", 3, number) for number in range(4)] == ["4", "GPU-8f", "7", "4"]
    assert [nth_gpu("5", 1, number) for number in range(2)] == ["5", "5"]
