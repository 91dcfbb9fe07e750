# SPDX-License-Identifier: MIT
# Completion of unshard for bash.
_unshard() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    local verb=${COMP_WORDS[1]-} words=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "mount umount ls info cat plan verify stats diff load hold doctor probe formats cache manifest version help" -- "$word")
    elif [[ $before == -o ]]; then
        words="cache_dir= cache_size= index=memory jobs= follow_symlinks map= hf= dtype="
        [[ $verb != mount ]] ||
            words+=" allow_other uid= gid= umask= prefix= views= refresh= rw save= debug gpu="
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    elif [[ $word == -* ]]; then
        words="--json -q -v -o"
        case $verb in
        mount) words="-o -f" ;;
        ls) words+=" -l" ;;
        cat) words+=" --npy" ;;
        verify) words+=" --deep" ;;
        plan) words+=" --binary" ;;
        hold) words+=" --device --budget" ;;
        load) words+=" --device --time" ;;
        diff) words+=" --rtol --atol --values --only --drop --map --hf --dtype --jobs" ;;
        esac
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -o filenames -o nospace -F _unshard unshard
