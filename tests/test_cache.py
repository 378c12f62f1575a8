from numbattn.cache import cache_dir


def test_place(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBATTN_CACHE_DIR", str(tmp_path))
    assert cache_dir("cuda") == tmp_path / "cuda"
    monkeypatch.delenv("NUMBATTN_CACHE_DIR")
    assert cache_dir("cuda").parts[-2:] == ("numbattn", "cuda")
